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
    """Machines and devices of one role, whose ranks fill one machine after the other."""

    machines: tuple[Machine, ...] | None = None
    """The machines, in the order of the ranks; by default all of the cluster."""
    devices: tuple[Device, ...] | None = None
    """The devices on each of these machines, in the order of the ranks there; by default from 0 on."""

    @model_validator(mode="after")
    def _given(self) -> Self:
        if not (self.machines or self.devices) or self.machines == () or self.devices == ():
            raise ValueError("names no machine or no device; name some, or leave it out")
        return self

    def __str__(self) -> str:
        fields = {"machines": self.machines, "devices": self.devices}
        return ", ".join(f"{name} {list(numbers)}" for name, numbers in fields.items() if numbers)


def _placed(value: Any) -> Any:
    """A bare list means devices."""
    return {"devices": value} if isinstance(value, list | tuple) else value


Placed = Annotated[RolePlacement | None, BeforeValidator(_placed)]


class PlacementSection(Config):
    """Each role's ranks, as ``{machines: [...], devices: [...]}``, or a bare list of devices."""

    actor: Placed = None
    """Ranks of the actor."""
    critic: Placed = None
    """Ranks of the critic."""
    reference: Placed = None
    """Ranks of the reference."""
    reward: Placed = None
    """Ranks of the reward model."""
    rollout: Placed = None
    """Ranks of the rollout engine: devices of each server's ranks, one server after the other."""

    def of(self, name: str) -> RolePlacement | None:
        """The placement that is given for the role ``name``."""
        section: RolePlacement | None = getattr(self, name)
        return section

    def devices(self, role: str) -> tuple[int, ...] | None:
        """The given devices of ``role``, on each of its machines."""
        section = self.of(role)
        return None if section is None else section.devices

    def serves_on_machines(self, cluster: ClusterSection) -> bool:
        """Whether rollout servers are placed on machines of ``cluster``, instead of the one where the driver is."""
        return not cluster.is_local and self.rollout is not None and self.rollout.machines is not None
