"""The machines of a run: start, resources, and checks of shared paths."""

from __future__ import annotations

import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal

from core_rl.config.engine import EngineConfig, TrainEngineConfig
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError, raise_all
from core_rl.launch.hosts import Hosts, LocalHosts, load_hosts
from core_rl.launch.machines import call_on_machines
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.recipe.cluster import ClusterSection, SchedulingSection

Device = Literal["auto", "cpu", "cuda"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux keeps it


@contextmanager
def open_cluster(
    section: ClusterSection, engines: Mapping[str, EnginePlan[EngineConfig]], device: Device
) -> Iterator[Hosts]:
    """The machines of ``section`` for ``engines``, by role, until the context ends; `ClusterError` unless all come."""
    with closing(cluster_hosts(section, engines, device)) as hosts:
        hosts.open()
        yield hosts


def cluster_hosts(
    section: ClusterSection, engines: Mapping[str, EnginePlan[EngineConfig]], device: Device
) -> Hosts:
    """The hosts that ``section`` describes; nothing is started. Raises `ConfigError`."""
    if section.is_local:
        return LocalHosts()
    resources, env = machine_request(engines, section.scheduling, device)
    if missing := [name for name in section.environment if name not in os.environ]:
        raise ConfigError(
            f"cluster.environment = {missing}: not set on this machine; set them, or leave them out"
        )
    address = {} if section.address is None else {"address": section.address}
    return load_hosts(section.type)(
        section.machines,
        section.ranks_per_machine,
        resources=resources,
        wait_s=section.wait_s,
        lease_s=section.lease_s,
        environment={name: os.environ[name] for name in section.environment} | env,
        **address,
    )


def machine_request(
    engines: Mapping[str, EnginePlan[EngineConfig]], scheduling: SchedulingSection, device: Device
) -> tuple[dict[str, float], dict[str, str]]:
    """Amounts of each machine by Ray's names, and environment variables of its ranks.

    Each amount of ``scheduling``, by default the needs of ``engines`` on ``device`` on the machine with the most.
    ``engines`` are on the cluster's machines, by role. Amounts that no engine knows are left out.
    """
    cores, memory = Counter[int](), Counter[int]()
    gpu, variables = 0, dict[str, str]()
    for engine in engines.values():
        config = engine.config.model_copy(update={"device": device})
        unit = load_engine(engine.spec, config).get_scheduling_config()  # of one rank, or one server
        variables |= dict(unit.env)
        for slot in engine.slots:
            cores[slot.machine] += (
                0 if engine.colocated_with else unit.cpu
            )  # the processes are another role's
            memory[slot.machine] += unit.memory_mib
            gpu = max(gpu, slot.device + 1 if unit.gpu else 0)
    most = max(memory.values(), default=0) if scheduling.memory_mib is None else scheduling.memory_mib
    amounts: dict[str, float | None] = {
        "CPU": scheduling.cpu or max(cores.values(), default=0) or None,
        "GPU": (gpu or None) if scheduling.gpu is None else scheduling.gpu,
        "memory": 2**20 * most or None,
    }
    resources = {name: amount for name, amount in amounts.items() if amount is not None}
    return resources | scheduling.resources, variables | scheduling.env


def check_machines(
    hosts: Hosts,
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]],
    output: Path,
    memory_sender: int | None = None,
) -> None:
    """Raise `ConfigError` where machines lack models of their ranks, or do not share the directory ``output``.

    ``memory_sender`` is the machine from which weights go through shared memory.
    """
    if isinstance(hosts, LocalHosts):
        return
    machines = sorted({machine for plan in trainers.values() for machine in plan.machines})
    require_shared(hosts, "output_dir", output, machines)
    if memory_sender is not None:
        _require_shared_memory(hosts, memory_sender)
    models = {role: path for role, plan in trainers.items() if (path := plan.config.model.path) is not None}
    reports = call_on_machines(hosts, machines, missing_paths, sorted({*models.values()}))
    lacking = {
        role: [machine for machine in trainers[role].machines if path in reports[machine][1]]
        for role, path in models.items()
    }
    problems = [
        f"the model of the {role} = {models[role]!r}: it does not exist on {_named(blind, reports)}; put it there, or "
        "on a shared disk"
        for role, blind in lacking.items()
        if blind
    ]
    raise_all(ConfigError, "cluster", problems)


def require_shared(hosts: Hosts, field: str, directory: Path, machines: Sequence[int]) -> None:
    """Raise `ConfigError` unless ``machines`` see the files that this one writes to ``directory``."""
    if not isinstance(hosts, LocalHosts) and (listed := _strangers(hosts, directory, machines)):
        raise ConfigError(
            f"{field} = {str(directory)!r}: {listed} and this machine ({platform.node()}) do not see the same files "
            "there. Checkpoints and models are written by ranks on several machines: name a directory of a file system "
            "that all of them share (NFS, Lustre), under the same path"
        )


def _require_shared_memory(hosts: Hosts, machine: int) -> None:
    """Raise `ConfigError` unless ``machine`` is this one, whose memory both sides of a sync by ``tensor`` use."""
    if SHARED_MEMORY.is_dir() and (listed := _strangers(hosts, SHARED_MEMORY, [machine])):
        raise ConfigError(
            f"rollout.sync = 'tensor': it goes through the memory of one machine, and the actor sends from {listed}, "
            f"while the rollout engine is on this one ({platform.node()}); set rollout.sync to 'distributed' or 'disk'"
        )


def _strangers(hosts: Hosts, directory: Path, machines: Sequence[int]) -> str:
    """Names of ``machines`` that do not see a new file of this one in ``directory``."""
    with ExitStack() as stack:
        try:
            nonce = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".core-rl-seen-", dir=directory))
        except OSError as error:
            raise ConfigError(
                f"{directory}: {error.strerror}; name a directory that can be written"
            ) from error
        reports = call_on_machines(hosts, machines, missing_paths, [nonce.name])
    blind = [machine for machine, (_, missing) in reports.items() if missing]
    return _named(blind, reports) if blind else ""


def missing_paths(paths: Sequence[str]) -> tuple[str, list[str]]:
    """Host name of this machine, and its missing ``paths``."""
    return platform.node(), [path for path in paths if not os.path.exists(path)]  # noqa: PTH110  # of pickled text


def _named(machines: Sequence[int], reports: Mapping[int, tuple[str, list[str]]]) -> str:
    """``machines 1 (node1) and 2 (node2)``, by the host names of `missing_paths`."""
    parts = [f"{machine} ({reports[machine][0]})" for machine in machines]
    return f"machine{'s' if len(parts) > 1 else ''} {' and '.join(parts)}"
