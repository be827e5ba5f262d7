"""The section ``placement`` of a recipe: the machines and devices of each role."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from core_rl.config.base import Config
from core_rl_trainer.recipe.cluster import ClusterSection

__all__ = ["PlacementSection", "RolePlacement"]

Device = Annotated[int, Field(ge=0)]
"""The number of a device of a machine."""
Machine = Annotated[int, Field(ge=0)]
"""The number of a machine of the cluster."""


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
