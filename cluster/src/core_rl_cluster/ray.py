"""`RayHosts`: machines of a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from core_rl.errors import ClusterError, ConfigError, MissingPackage
from core_rl_cluster import ray_nodes
from core_rl_cluster.agent_hosts import AGENT, AgentHosts
from core_rl_cluster.hello import KEY_VARIABLE
from core_rl_cluster.ray_nodes import AgentActor, amounts, shortage, silent_nodes

__all__ = ["RayHosts"]

logger = logging.getLogger(__name__)

CALL_S = 30.0
"""Time limit of a call to Ray that only asks or frees something."""
PROBE_S = 60.0
"""Time limit for a cluster to respond, the import of Ray included."""
LOOK_S = 1.0
"""Between two looks at whether resources are there."""
LOG_EVERY_S = 30.0
SILENT_S = 60.0
"""The longest wait for Ray to notice that a node is gone. One whose port only this driver cannot reach stays silent."""
FEWER_S = 10.0
"""Time limit for the resources of fewer machines, when not all were there in time."""
NO_CLUSTER = (
    "start one with `ray start --head` on one machine and `ray start --address=HOST:6379` on each other one, and run "
    "this program on one of them"
)


@dataclass(eq=False, repr=False)
class RayHosts(AgentHosts):
    """``machines`` nodes of a Ray cluster, with up to ``ranks_per_machine`` ranks on each.

    A placement group reserves the ``resources`` of each machine: by default ``CPU`` and, where the cluster has any,
    ``GPU``, ``ranks_per_machine`` of each; ``{"CPU": 1, "accelerator_type:H100": 0.001}`` changes or adds some. Ray
    starts an actor on each machine, and the actor an agent, which starts the ranks; Ray carries no batches. The ranks
    of a machine see the GPUs that Ray has given to its actor.

    ``ray_address`` is that of the cluster, by default what ``RAY_ADDRESS`` names or the cluster that this machine
    belongs to. A program that has called ``ray.init()`` keeps its connection, also after `close`. The driver runs on a
    node of the cluster. For other arguments see `AgentHosts`; ``wait_s`` includes the wait for the resources.

    Raises `MissingPackage` without Ray, and `ClusterError` where there is no cluster, or where it does not have the
    resources within ``wait_s`` seconds.
    """

    _: KW_ONLY
    ray_address: str = "auto"
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address.startswith("ray://"):
            raise ConfigError(
                f"ray_address = {self.ray_address!r} is an address of Ray Client; run this program on a node of the "
                "cluster, or by `ray job submit`, and leave ray_address out"
            )
        self._ray = _import_ray()
        self._connected = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}
        """The machine of each agent's call, which returns when the agent ends."""

    def _own_address(self) -> str:
        """The address under which this node is known to the others."""
        self._connect()
        return str(self._ray.util.get_node_ip_address())

    def _launch(self, driver: str, key: bytes) -> None:
        self._connect()
        self._wait_for_silent_nodes()
        bundle = self._bundle()
        self.expect(self._reserve(bundle))
        for machine, number in enumerate(self._bundles()):
            actor = self._actor(number, bundle)
            self._actors.append(actor)
            arguments = [*AGENT, "--driver", driver, "--machine", str(machine), "--with-parent"]
            self._running[actor.serve.remote(arguments, {KEY_VARIABLE: key.hex()})] = machine

    def _check_launched(self) -> None:
        if not self._running:
            return
        ended, _ = self._ray.wait(list(self._running), timeout=0)
        if ended:
            machine = self._running[ended[0]]
            raise ClusterError(f"the agent of machine {machine} {_end_of(self._ray, ended[0])}")

    def _end_launched(self) -> None:
        actors, self._actors = self._actors, []
        self._running.clear()
        if self._ray.is_initialized():
            for actor in actors:
                self._ray.kill(actor)
            self._remove_group()
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def _connect(self) -> None:
        """Connect to the cluster unless the program has."""
        if self._ray.is_initialized():
            return
        _require_healthy(self.ray_address, min(PROBE_S, self.wait_s))
        errors = (ConnectionError, ValueError, RuntimeError, OSError, self._ray.exceptions.RayError)
        try:
            with _same_sigterm():
                self._ray.init(address=self.ray_address, log_to_driver=True)
        except errors as error:
            raise ClusterError(f"no Ray cluster at {self.ray_address!r}: {error}; {NO_CLUSTER}") from error
        self._connected = True

    def _bundle(self) -> dict[str, float]:
        """The resources of one machine."""
        gpus = self.ranks_per_machine if self._ray.cluster_resources().get("GPU") else 0
        bundle = {"CPU": self.ranks_per_machine, "GPU": gpus, **self.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    def _reserve(self, bundle: Mapping[str, float]) -> int:
        """Make the group, of fewer machines where no more are there in time; returns their number."""
        for count in range(self.machines, self.least - 1, -1):
            bundles = [dict(bundle)] * count
            self._group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            if self._is_ready(bundle, self.time_left() if count == self.machines else FEWER_S):
                return count
            self._remove_group()
        nodes, free = self._ray.nodes(), self._ray.available_resources()
        raise ClusterError(shortage(nodes, free, self.least, bundle, self.wait_s))

    def _wait_for_silent_nodes(self) -> None:
        """Return when Ray knows of each node that does not respond that it is gone, or after a while."""
        deadline = time.monotonic() + min(SILENT_S, self.time_left())
        logged = False
        while silent := silent_nodes(self._ray.nodes()):
            if not logged:
                logged = True
                logger.warning(
                    "Ray nodes that do not respond: %s; waiting for Ray to notice", ", ".join(silent)
                )
            if time.monotonic() > deadline:
                logger.warning("Ray takes them for alive: %s; it may use them", ", ".join(silent))
                return
            time.sleep(LOOK_S)

    def _is_ready(self, bundle: Mapping[str, float], limit_s: float) -> bool:
        """Whether the group has its resources in time; a group that does not fit would wait for ever."""
        started = logged = time.monotonic()
        while (waited := time.monotonic() - started) < limit_s:
            if self._group.wait(timeout_seconds=min(limit_s - waited, LOOK_S)):
                return True
            if time.monotonic() - logged > LOG_EVERY_S:
                logged = time.monotonic()
                logger.warning("waiting for %d Ray nodes with %s each", self.machines, amounts(bundle))
        return False

    def _remove_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(self._ray.exceptions.RayError):  # the cluster is gone, and the group with it
                self._ray.util.remove_placement_group(group)

    def _bundles(self) -> list[int]:
        """The group's bundles in the order of machines: this node first, then by address."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        local = self._ray.get_runtime_context().get_node_id()
        placed = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(placed, key=lambda number: (placed[number] != local, addresses[placed[number]]))

    def _actor(self, number: int, bundle: Mapping[str, float]) -> Any:
        """The parent of an agent, with all that bundle ``number`` has; it ends with the driver."""
        self._ray.cloudpickle.register_pickle_by_value(ray_nodes)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": strategy(self._group, placement_group_bundle_index=number),
        }
        return self._ray.remote(**options)(AgentActor).remote()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackage(
            f"RayHosts needs Ray, which cannot be imported ({error}); run: pip install 'core-rl[ray]'"
        ) from error


def _require_healthy(address: str, limit_s: float) -> None:
    """Raise `ClusterError` unless a cluster responds at ``address``, which ``ray.init`` would try for minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"no Ray cluster responds at {address!r} within {limit_s:g} s; {NO_CLUSTER}"
        ) from error
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ClusterError(f"no Ray cluster at {address!r}: {reason}; {NO_CLUSTER}")


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, with which a scheduler asks this program to save and end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _end_of(ray: Any, running: Any) -> str:
    """A phrase about the end of an agent, or of its actor."""
    try:
        return str(ray.get(running, timeout=CALL_S))
    except ray.exceptions.RayError as error:
        return f"is gone: {type(error).__name__}: {error}"
