"""`RayHosts`: machines of a Ray cluster."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing import util
from typing import Any, Self

from core_rl.distributed.authentication import new_key
from core_rl.errors import ClusterError, ConfigError, raise_all
from core_rl.launch.hosts import Rank, Slot, end_ranks
from core_rl.registry.packages import import_extra
from core_rl_cluster.machine import MachineActor, MachineInfo, driver_code, versions
from core_rl_cluster.remote import RayMachine, RayRank, first_line

logger = logging.getLogger(__name__)

PROBE_S = 25.0
"""Time limit for a cluster to respond, the import of Ray included."""
ACTORS_S = 30.0
"""Time limit for the actors of machines that Ray has given: it may take a lost machine for alive, for a minute."""
THREADS = 16
"""Calls that an actor serves at one time; one waits for ends of ranks."""
SHARED = (
    "CUBLAS_WORKSPACE_CONFIG", "HF_HUB_OFFLINE", "MKL_NUM_THREADS", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TORCH_LOGS", "TRANSFORMERS_OFFLINE",
    "TRANSFORMERS_VERBOSITY",
)  # fmt: skip
"""Variables that mean the same on every machine, and are no secrets: connections are not encrypted."""
FAILED = re.compile("creation task|failed to import|ModuleNotFoundError")
"""In Ray's message about an actor that another attempt would not start."""
NO_CLUSTER = (
    "start one with `ray start --head` on one machine and `ray start --address=HOST:6379` on each other one, and run "
    "this program on one of them, with the same token"
)


@dataclass(eq=False, repr=False)
class RayHosts:
    """``machines`` nodes of a Ray cluster, with up to ``ranks_per_machine`` ranks of each group on each.

    A placement group reserves the ``resources`` of each machine: by default ``CPU`` and, where the cluster has any,
    ``GPU``, ``ranks_per_machine`` of each; ``{"CPU": 1, "accelerator_type:H100": 0.001}`` changes or adds some. Ray
    gives them within ``wait_s`` seconds to an actor on each machine, which starts the ranks; these see its GPUs.

    ``address`` is that of the cluster, by default what ``RAY_ADDRESS`` names or that of this machine. A
    program that has called ``ray.init()`` keeps its connection. A machine from which nothing comes for ``lease_s``
    seconds is lost, and ends its ranks by itself. Ranks get the environment of their machine, a few of the driver's
    variables that mean the same everywhere, and ``environment``.

    The machines are taken at first use, or by entering the context, and let go by `close`, or when the driver ends.

    Raises `MissingPackage` without Ray, `ConfigError` for settings that cannot be, and from `open` on `ClusterError`
    where there is no cluster, or where it does not have the resources.
    """

    machines: int
    ranks_per_machine: int = 1
    _: KW_ONLY
    address: str = "auto"
    resources: Mapping[str, float] = field(default_factory=dict)
    wait_s: float = 300.0
    lease_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_all(ConfigError, "RayHosts", self._problems())
        self._ray = import_extra("ray", "RayHosts needs Ray")
        self._is_driver_of_ray = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._machines: list[RayMachine] = []
        self._key = new_key()
        self._rank_ids = itertools.count()
        self._starting = threading.RLock()

    def _problems(self) -> Iterator[str]:
        for name in ("machines", "ranks_per_machine", "wait_s", "lease_s"):
            if not (value := getattr(self, name)) > 0:
                yield f"{name} = {value}; it must be positive"
        if self.address.startswith("ray://"):
            yield (
                f"address = {self.address!r} is an address of Ray Client; run this program on a node of the cluster, "
                "or by `ray job submit`, and leave address out"
            )

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ hosts

    def open(self) -> None:
        """Have an actor on each machine; raises `ClusterError` with the cause. Further calls do nothing."""
        with self._starting:
            if self._machines:
                return
            deadline = time.monotonic() + self.wait_s
            try:
                self._connect()
                gpus = self.ranks_per_machine if self._ray.cluster_resources().get("GPU") else 0
                bundle = {"CPU": self.ranks_per_machine, "GPU": gpus, **self.resources}
                bundle = {name: amount for name, amount in bundle.items() if amount}
                while not self._machines:
                    self._reserve(bundle, deadline)
                    self._start_actors(bundle, deadline)
            except BaseException:
                self.close()
                raise
            # For hosts that are forgotten, and before `multiprocessing` waits for its processes.
            util.Finalize(self, _end_actors, args=(self._ray, self._actors), exitpriority=50)

    def close(self) -> None:
        """End all processes on the machines, and leave the cluster. Further calls do nothing."""
        with self._starting:
            machines, self._machines = self._machines, []
            for machine in machines:
                machine.lose("was let go")
            _end_actors(self._ray, self._actors)
            if self._ray.is_initialized():
                self._remove_group()
            if self._is_driver_of_ray:
                self._is_driver_of_ray = False
                self._ray.shutdown()

    def slots(self, count: int, machines: Sequence[int] | None, devices: Sequence[int] | None) -> list[Slot]:
        local = list(range(self.ranks_per_machine) if devices is None else devices)
        numbers = list(range(self.machines))
        usable = numbers if machines is None else list(machines)
        if set(usable) - set(numbers) or len(set(usable)) != len(usable):
            raise ConfigError(f"machines = {usable}: there are {numbers}; name each of them at most once")
        if len(set(local)) != len(local):
            raise ConfigError(f"devices = {local}; name different devices, numbered on each machine")
        if len(usable) * len(local) < count:
            raise ConfigError(
                f"a layout of {count} ranks, and machines {usable} have places for {len(usable) * len(local)}, "
                f"{len(local)} each; use a smaller layout, more machines, or more ranks on each machine"
            )
        return [Slot(machine, device) for machine in usable for device in local][:count]

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        environ = {name: os.environ[name] for name in SHARED if name in os.environ} | dict(self.environment)
        by_machine = defaultdict[int, list[tuple[int, int]]](list)
        for number, slot in ranks:
            by_machine[slot.machine].append((next(self._rank_ids), number))
        started: list[RayRank] = []
        try:
            for machine, numbers in by_machine.items():
                started += self._machine(machine).start(numbers, environ, self._key)
        except BaseException:
            end_ranks(started)
            raise
        return sorted(started, key=lambda rank: rank.rank)

    def cores(self, machine: int) -> int:
        return self._machine(machine).info.cores

    def address_of(self, machine: int) -> str:
        return self._machine(machine).info.address

    @property
    def driver_address(self) -> str:
        """The address of this machine towards the others."""
        self.open()
        return str(self._ray.util.get_node_ip_address())

    def _machine(self, number: int) -> RayMachine:
        self.open()
        machine = self._machines[number]
        if machine.lost is not None:
            raise ClusterError(
                f"{machine} {machine.lost}. Close these hosts, and open them again for other machines"
            )
        return machine

    # ---------------------------------------------------------------- cluster

    def _connect(self) -> None:
        """Connect to the cluster unless the program has."""
        if self._ray.is_initialized():
            return
        if (mode := os.environ.get("RAY_AUTH_MODE")) != "token":
            raise ConfigError(
                f"RAY_AUTH_MODE = {mode!r}: anybody who reaches a port of Ray could run programs on all machines; set "
                "it to 'token', and RAY_AUTH_TOKEN, on each machine before `ray start`, and for this program"
            )
        _require_healthy(self.address, min(PROBE_S, self.wait_s))
        errors = (ConnectionError, ValueError, RuntimeError, OSError, self._ray.exceptions.RayError)
        try:
            with _same_sigterm():
                self._ray.init(address=self.address, log_to_driver=True)
        except errors as error:
            raise ClusterError(
                f"no Ray cluster at {self.address!r}: {first_line(error)}; {NO_CLUSTER}"
            ) from error
        self._is_driver_of_ray = True

    def _reserve(self, bundle: Mapping[str, float], deadline: float) -> None:
        """Make the placement group, which would wait for ever where it does not fit."""
        bundles = [dict(bundle)] * self.machines
        self._group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        logger.info("waiting for %d Ray nodes with %s each", self.machines, amounts(bundle))
        if self._group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            return
        nodes, free = self._ray.nodes(), self._ray.available_resources()
        raise ClusterError(shortage(nodes, free, self.machines, bundle, self.wait_s))

    def _remove_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(self._ray.exceptions.RayError):  # the cluster is gone, and the group with it
                self._ray.util.remove_placement_group(group)

    def _start_actors(self, bundle: Mapping[str, float], deadline: float) -> None:
        """An actor in each bundle, in the order of machines: this node first, then by address.

        There are none afterwards where a node does not respond that Ray takes for alive.
        """
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        local = self._ray.get_runtime_context().get_node_id()
        placed = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        numbers = sorted(placed, key=lambda number: (placed[number] != local, addresses[placed[number]]))
        self._actors += [self._actor(number, addresses[placed[number]], bundle) for number in numbers]
        infos = []
        for number, actor in zip(numbers, self._actors, strict=True):
            try:
                infos.append(self._ray.get(actor.info.remote(), timeout=ACTORS_S))
            except self._ray.exceptions.RayError as error:
                text = f"the node {addresses[placed[number]]} did not start an actor: {first_line(error)}"
                if FAILED.search(str(error)) or time.monotonic() > deadline:
                    raise ClusterError(f"{text}; install the same packages there as here") from error
                logger.warning("%s; asking Ray again", text)
                _end_actors(self._ray, self._actors)
                self._remove_group()
                return
        raise_all(ClusterError, "cluster", _misfits(infos))
        for number, (actor, info) in enumerate(zip(self._actors, infos, strict=True)):
            self._machines.append(RayMachine(self._ray, actor, number, info, self.lease_s))

    def _actor(self, number: int, address: str, bundle: Mapping[str, float]) -> Any:
        """The actor of a machine, with all that bundle ``number`` has; it ends with the driver."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "max_concurrency": THREADS,
            "scheduling_strategy": strategy(self._group, placement_group_bundle_index=number),
        }
        make = self._ray.remote(**options)(MachineActor).remote
        return make(address, driver_code(), self._key, self.lease_s)


def shortage(
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, float],
    machines: int,
    bundle: Mapping[str, float],
    wait_s: float,
) -> str:
    """A message about a cluster without ``machines`` nodes that have the resources of ``bundle`` free.

    ``nodes`` come from ``ray.nodes()``, and ``free`` from ``ray.available_resources()``.
    """
    large = sum(node["Alive"] and not _lacks(node, bundle) for node in nodes)
    if large < machines:
        cause = f"{large} are large enough: add nodes, or ask for fewer machines or resources"
    else:
        cause = (
            f"{large} are large enough, and others use them: {amounts(_of(free, bundle))} are free in all. End "
            "other jobs, or wait longer (wait_s)"
        )
    lines = [_line(node, bundle) for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))]
    head = f"Ray did not give {machines} nodes with {amounts(bundle)} each within {wait_s:g} s"
    return "\n".join([f"{head}. Of {len(nodes)} nodes {cause}", *lines])


def amounts(resources: Mapping[str, float]) -> str:
    """``resources`` as text."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"


def _line(node: Mapping[str, Any], bundle: Mapping[str, float]) -> str:
    lacks = _lacks(node, bundle)
    state = "is not alive" if not node["Alive"] else f"lacks {amounts(lacks)}" if lacks else "is large enough"
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    return f"  {name} {state}: {amounts(_of(node['Resources'], bundle))}"


def _lacks(node: Mapping[str, Any], bundle: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that ``node`` lacks even when it is idle."""
    total = _of(node["Resources"], bundle)
    return {name: amount - total[name] for name, amount in bundle.items() if total[name] < amount}


def _of(resources: Mapping[str, float], bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in bundle}


def _misfits(infos: Sequence[MachineInfo]) -> Iterator[str]:
    """Machines with other versions than the driver has."""
    expected = versions()
    for number, info in enumerate(infos):
        differing = [name for name, version in expected.items() if info.versions[name] != version]
        if differing:
            actual = " and ".join(f"{name} {info.versions[name]}" for name in differing)
            here = " and ".join(f"{name} {expected[name]}" for name in differing)
            yield (
                f"machine {number} ({info.hostname}, {info.address}) has {actual}, and the driver {here}; install the "
                "same versions"
            )


def _end_actors(ray: Any, actors: list[Any]) -> None:
    while actors:
        actor = actors.pop()
        if ray.is_initialized():
            ray.kill(actor)


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
