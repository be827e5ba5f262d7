"""The section ``placement`` of a recipe: the machines and devices of each role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from core_rl.config.base import Config
from core_rl_trainer.recipe.cluster import ClusterSection

__all__ = [
    "PlacementSection",
    "RankSlot",
    "RolePlacement",
    "describe_slots",
    "place_ranks",
    "placement_problems",
]

Device = Annotated[int, Field(ge=0)]
"""The number of a device of a machine."""
Machine = Annotated[int, Field(ge=0)]
"""The number of a machine of the cluster."""


class RankSlot(NamedTuple):
    """Where one rank runs."""

    machine: int
    device: int


class RolePlacement(Config):
    """Where the ranks of one role run: they fill one machine after the other."""

    machines: tuple[Machine, ...] | None = None
    """The machines, in the order of the ranks; by default all of the cluster."""
    devices: tuple[Device, ...] | None = None
    """The devices on each of these machines, in the order of the ranks there; by default those from 0 on."""

    @model_validator(mode="after")
    def _given(self) -> Self:
        if not (self.machines or self.devices) or self.machines == () or self.devices == ():
            raise ValueError("names no machine or no device; name some, or leave it out")
        return self

    def __str__(self) -> str:
        given = {"machines": self.machines, "devices": self.devices}
        return ", ".join(f"{name} {list(numbers)}" for name, numbers in given.items() if numbers)


def _placed(value: Any) -> Any:
    """A bare list means devices."""
    return {"devices": value} if isinstance(value, list | tuple) else value


Placed = Annotated[RolePlacement | None, BeforeValidator(_placed)]


class PlacementSection(Config):
    """Each role's ranks, as ``{machines: [...], devices: [...]}``, or a bare list of devices."""

    actor: Placed = None
    """Of the actor."""
    critic: Placed = None
    """Of the critic."""
    reference: Placed = None
    """Of the reference."""
    reward: Placed = None
    """Of the reward model."""
    rollout: Placed = None
    """Of the rollout engine: devices of each server's ranks, one server after the other."""

    def of(self, name: str) -> RolePlacement | None:
        """The placement that is given for the role ``name``."""
        chosen: RolePlacement | None = getattr(self, name)
        return chosen

    def devices(self, role: str) -> tuple[int, ...] | None:
        """The devices of ``role`` that are given: those on each of its machines."""
        chosen = self.of(role)
        return None if chosen is None else chosen.devices

    def machines(self, role: str) -> tuple[int, ...] | None:
        """The machines of ``role`` that are given."""
        chosen = self.of(role)
        return None if chosen is None else chosen.machines

    def serves_on_machines(self, cluster: ClusterSection) -> bool:
        """Whether rollout servers are placed on machines of ``cluster``, instead of the one where the driver is."""
        return not cluster.is_local and self.machines("rollout") is not None

    def within(self, count: int) -> PlacementSection:
        """The same on the first ``count`` machines, where a role has one of them."""
        fewer: dict[str, RolePlacement] = {}
        for name in type(self).model_fields:
            chosen = self.of(name)
            left = tuple(machine for machine in (chosen and chosen.machines) or () if machine < count)
            if chosen is not None and left:
                fewer[name] = chosen.model_copy(update={"machines": left})
        return self.model_copy(update=fewer)


def place_ranks(ranks: int, chosen: RolePlacement | None, cluster: ClusterSection) -> tuple[RankSlot, ...]:
    """The slots of ``ranks`` ranks, in their order; fewer where there is no room for all of them."""
    machines, devices = _wanted(ranks, chosen, cluster)
    return tuple(RankSlot(machine, device) for machine in machines for device in devices)[:ranks]


def _wanted(
    ranks: int, chosen: RolePlacement | None, cluster: ClusterSection
) -> tuple[Sequence[int], Sequence[int]]:
    """Machines of a role, and devices on each."""
    machines = None if chosen is None else chosen.machines
    devices = None if chosen is None else chosen.devices
    default = range(cluster.ranks_per_machine or ranks)
    return (
        range(cluster.machines) if machines is None else machines,
        default if devices is None else devices,
    )


def placement_problems(ranks: int, chosen: RolePlacement | None, cluster: ClusterSection) -> Iterator[str]:
    """A sentence for everything that is wrong with the placement of ``ranks`` ranks."""
    machines, devices = _wanted(ranks, chosen, cluster)
    if missing := sorted({machine for machine in machines if machine >= cluster.machines}):
        yield f"there is no machine {missing[0]}; the cluster has {_count(cluster.machines, 'machine')}, from 0 on"
    for name, numbers in (("machine", machines), ("device", devices)):
        if repeated := sorted({number for number in numbers if list(numbers).count(number) > 1}):
            yield f"{name} {repeated[0]} is named twice; name a different {name} each time"
    limit = cluster.ranks_per_machine
    if limit is not None and (beyond := sorted({device for device in devices if device >= limit})):
        yield f"there is no device {beyond[0]}; cluster.ranks_per_machine = {limit}, from 0 on"
    room = len(machines) * len(devices)
    if ranks > room or not _fits(ranks, chosen, machines, devices):
        places = f"{_count(len(machines), 'machine')} with {_count(len(devices), 'device')} each"
        yield f"it has {_count(ranks, 'rank')}, and there is room for {room}: {places}; name as many as it has ranks"


def _fits(ranks: int, chosen: RolePlacement | None, machines: Sequence[int], devices: Sequence[int]) -> bool:
    """Whether every machine and device that is named gets a rank."""
    if chosen is None:
        return True
    used = -(-ranks // len(devices))
    all_machines = chosen.machines is None or used == len(machines)
    return all_machines and (chosen.devices is None or ranks % len(devices) == 0)


def describe_slots(slots: Sequence[RankSlot]) -> str:
    """``0-7 of machines 0-1``; without the machine where it is the first alone."""
    devices = {
        machine: tuple(slot.device for slot in own)
        for machine, own in groupby(slots, lambda slot: slot.machine)
    }
    if set(devices) <= {0}:
        return numbers(devices.get(0, ()))
    parts = []
    for same, group in groupby(devices, devices.__getitem__):
        machines = list(group)
        parts.append(f"{numbers(same)} of machine{'s' if len(machines) > 1 else ''} {numbers(machines)}")
    return ", ".join(parts)


def numbers(values: Sequence[int]) -> str:
    """``0, 1`` or, for more in a row, ``0-7``."""
    first = values[0] if values else 0
    if len(values) > 2 and list(values) == list(range(first, first + len(values))):
        return f"{first}-{values[-1]}"
    return ", ".join(map(str, values))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
