"""Slots of ranks: the machines and devices of a role, and checks of roles on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, WeightsError
from core_rl.launch.hosts import Slot
from core_rl.registry.spec import EngineSpec
from core_rl.weight_sync.buckets import require_shared_memory
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.recipe.cluster import ClusterSection, PlacementSection, RolePlacement


def place_ranks(ranks: int, placement: RolePlacement | None, cluster: ClusterSection) -> tuple[Slot, ...]:
    """The slots of ``ranks`` ranks, in their order; fewer where there is no room for all of them."""
    machines, devices = _available(ranks, placement, cluster)
    return tuple(Slot(machine, device) for machine in machines for device in devices)[:ranks]


def _available(
    ranks: int, placement: RolePlacement | None, cluster: ClusterSection
) -> tuple[Sequence[int], Sequence[int]]:
    """Machines of a role, and devices on each."""
    machines, devices = (placement.machines, placement.devices) if placement is not None else (None, None)
    return machines or range(cluster.machines), devices or range(cluster.ranks_per_machine or ranks)


def placement_problems(ranks: int, placement: RolePlacement | None, cluster: ClusterSection) -> Iterator[str]:
    """A sentence for everything that is wrong with the placement of ``ranks`` ranks."""
    machines, devices = _available(ranks, placement, cluster)
    if missing := sorted({machine for machine in machines if machine >= cluster.machines}):
        yield f"there is no machine {missing[0]}; the cluster has {_count(cluster.machines, 'machine')}, from 0 on"
    for name, numbers in (("machine", machines), ("device", devices)):
        if repeated := sorted({number for number in numbers if list(numbers).count(number) > 1}):
            yield f"{name} {repeated[0]} is named twice; name a different {name} each time"
    limit = cluster.ranks_per_machine
    if limit is not None and (beyond := sorted({device for device in devices if device >= limit})):
        yield f"there is no device {beyond[0]}; cluster.ranks_per_machine = {limit}, from 0 on"
    room = len(machines) * len(devices)
    if ranks > room or not _fits(ranks, placement, machines, devices):
        places = f"{_count(len(machines), 'machine')} with {_count(len(devices), 'device')} each"
        yield f"it has {_count(ranks, 'rank')}, and there is room for {room}: {places}; name as many as it has ranks"


def _fits(
    ranks: int, placement: RolePlacement | None, machines: Sequence[int], devices: Sequence[int]
) -> bool:
    """Whether every machine and device that is named gets a rank."""
    if placement is None:
        return True
    used = -(-ranks // len(devices))
    all_machines = placement.machines is None or used == len(machines)
    return all_machines and (placement.devices is None or ranks % len(devices) == 0)


def describe_slots(slots: Sequence[Slot]) -> str:
    """``0-7 of machines 0-1``; without the machine where it is the first alone."""
    devices = {
        machine: tuple(slot.device for slot in slots_there)
        for machine, slots_there in groupby(slots, lambda slot: slot.machine)
    }
    if set(devices) <= {0}:
        return numbers(devices.get(0, ()))
    parts = []
    for same, group in groupby(devices, devices.__getitem__):
        machines = list(group)
        parts.append(f"{numbers(same)} of machine{'s' if len(machines) > 1 else ''} {numbers(machines)}")
    return ", ".join(parts)


def describe_ranks(plan: EnginePlan[EngineConfig]) -> str:
    """Ranks, devices and processes of ``plan``; empty where it has no slots."""
    count = len(plan.slots)
    if not count:
        return ""
    ranks, devices, processes = (
        ("1 rank", "device", "a process") if count == 1 else (f"{count} ranks", "devices", "processes")
    )
    home = f"the processes of the {plan.colocated_with}" if plan.colocated_with else f"{processes} of its own"
    return f"{ranks}, on {devices} {describe_slots(plan.slots)}, in {home}"


def numbers(values: Sequence[int]) -> str:
    """``0, 1`` or, for more in a row, ``0-7``."""
    first = values[0] if values else 0
    if len(values) > 2 and list(values) == list(range(first, first + len(values))):
        return f"{first}-{values[-1]}"
    return ", ".join(map(str, values))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def sender_slot(actor: EnginePlan[TrainEngineConfig]) -> Slot:
    """The slot of the actor's rank that sends weights."""
    layout = actor.config.layout
    output = {"dp": 0, "tp": 0, "cp": 0, "pp": layout.pp - 1}
    ranks = range(layout.world_size)
    return actor.slots[next(rank for rank in ranks if layout.coordinates(rank) == output)]


def require_free_device(
    actor: EnginePlan[TrainEngineConfig],
    rollout: EnginePlan[InferenceEngineConfig],
    servers: Collection[Slot],
) -> None:
    """Raise `ConfigError` where the actor's rank that sends weights over NCCL is on a device of ``servers``."""
    on_cuda = device_type(actor.config.device) == device_type(rollout.config.device) == "cuda"
    if not on_cuda or not rollout.spec.supports(Capability.LAUNCH_SERVER):
        return
    slot = sender_slot(actor)
    if slot in servers:
        raise ConfigError(
            f"rollout.sync = 'distributed': the actor sends from device {slot.device}, where a server runs as well, "
            "and NCCL takes one rank for each device; set rollout.sync to 'tensor', or give the servers other devices "
            "(placement.rollout)"
        )


def require_sync_memory(rollout: EngineSpec, model_path: str, servers_on_machines: bool) -> None:
    """Raise `ConfigError` where weights that are synced by shared memory have no room there.

    Servers keep a version while the next one arrives; other engines take it bucket by bucket.
    """
    if servers_on_machines:
        raise ConfigError(
            "rollout.sync = 'tensor' goes through the memory of one machine, and placement.rollout names machines for "
            "the servers; set it to 'distributed' or 'disk'"
        )
    weights = sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
    needed = (
        2 * weights + WeightUpdateMeta.bucket_bytes
        if rollout.supports(Capability.LAUNCH_SERVER)
        else min(weights, 2 * WeightUpdateMeta.bucket_bytes)
    )
    try:
        require_shared_memory(needed, f"rollout.sync = 'tensor' for the weights in {model_path!r}")
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def misplaced_roles(
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]],
    rollout: EnginePlan[InferenceEngineConfig],
    placement: PlacementSection,
    cluster: ClusterSection,
) -> Iterator[str]:
    """A sentence for each role whose ranks do not fit into its placement."""
    for name in PlacementSection.model_fields:
        section = placement.of(name)
        subject = name if section is None else f"{name} = {section}"
        if name == "rollout":
            yield from _misplaced_rollout(rollout, placement, cluster)
        elif name in trainers:
            ranks = trainers[name].config.layout.world_size
            yield from (f"{subject}: {problem}" for problem in placement_problems(ranks, section, cluster))
        elif section is not None:
            yield f"{subject}: this run has no such role with ranks of its own; leave it out"


def _misplaced_rollout(
    rollout: EnginePlan[InferenceEngineConfig], placement: PlacementSection, cluster: ClusterSection
) -> Iterator[str]:
    """Sentences about the machines of servers; devices of the driver's machine are checked with the engine's config."""
    section = placement.of("rollout")
    if section is None or section.machines is None:
        return
    subject = f"rollout = {section}"
    if cluster.is_local:
        if section.machines != (0,):
            yield f"{subject}: there is one machine, 0; set cluster.type and cluster.machines"
        return
    if not rollout.spec.supports(Capability.LAUNCH_SERVER):
        yield (
            f"{subject}: the engine {rollout.spec.name!r} has no servers, and runs where this command does; leave "
            "machines out"
        )
        return
    ranks = rollout.config.layout.world_size
    yield from (f"{subject}: {problem}" for problem in placement_problems(ranks, section, cluster))
