"""Slots of ranks: the machines and devices of a role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from core_rl.config.engine import EngineConfig
from core_rl.launch.hosts import Slot
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.placement import RolePlacement

__all__ = ["describe_ranks", "describe_slots", "place_ranks", "placement_problems"]


def place_ranks(ranks: int, placement: RolePlacement | None, cluster: ClusterSection) -> tuple[Slot, ...]:
    """The slots of ``ranks`` ranks, in their order; fewer where there is no room for all of them."""
    machines, devices = _available(ranks, placement, cluster)
    return tuple(Slot(machine, device) for machine in machines for device in devices)[:ranks]


def _available(
    ranks: int, placement: RolePlacement | None, cluster: ClusterSection
) -> tuple[Sequence[int], Sequence[int]]:
    """Machines of a role, and devices on each."""
    machines = None if placement is None else placement.machines
    devices = None if placement is None else placement.devices
    default = range(cluster.ranks_per_machine or ranks)
    return (
        range(cluster.machines) if machines is None else machines,
        default if devices is None else devices,
    )


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
