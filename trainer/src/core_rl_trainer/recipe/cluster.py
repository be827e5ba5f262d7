"""The sections ``cluster`` and ``placement`` of a recipe: machines of a run, and those of each role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from core_rl.config.base import Config

__all__ = ["ClusterSection", "ClusterType", "PlacementSection", "RolePlacement", "SchedulingSection"]

Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
"""Text that fits into one line."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

ClusterType = Literal["local", "ray"]


class SchedulingSection(Config):
    """Resources that Ray gives on each machine. By default the engines' needs (`core_rl.backend.meta.Scheduling`)."""

    cpu: int | None = Field(default=None, ge=1)
    """CPU cores."""
    gpu: int | None = Field(default=None, ge=0)
    """GPUs."""
    memory_mib: int | None = Field(default=None, ge=0)
    """Memory in MiB; 0 asks for none."""
    resources: dict[Line, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Other resources of Ray, such as ``accelerator_type:H100: 0.001``."""
    env: dict[VariableName, Line] = Field(default_factory=dict)
    """Environment variables of the ranks, besides the engines'."""


class ClusterSection(Config):
    """The machines on which ranks run. Their number and addresses may change when a run is resumed."""

    type: ClusterType = "local"
    """``local``: this machine. ``ray``: machines of a Ray cluster."""
    machines: int = Field(default=1, ge=1)
    """The number of machines, which are numbered from 0."""
    ranks_per_machine: int | None = Field(default=None, ge=1)
    """The largest number of ranks of one role on each machine: as a rule, its accelerators."""
    address: Line | None = None
    """The address of the Ray cluster; null takes that of ``RAY_ADDRESS``, or that of this machine."""
    wait_s: float = Field(default=300.0, gt=0.0)
    """The longest wait for all machines, in seconds."""
    lease_s: float = Field(default=30.0, gt=0.0)
    """After so many seconds without a sign of life a machine counts as lost, and its ranks end by themselves."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables, by name, that ranks get from this machine, besides the usual ones."""
    restarts: int = Field(default=0, ge=0)
    """Number of restarts from the last checkpoint after lost ranks or machines."""
    scheduling: SchedulingSection = SchedulingSection()
    """Resources that Ray gives on each machine."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        return self

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.type == "local"

    @property
    def number(self) -> str:
        """A phrase about the number of machines."""
        if self.is_local:
            return "this machine"
        return "1 machine" if self.machines == 1 else f"{self.machines} machines"

    def __str__(self) -> str:
        again = "" if not self.restarts else f", {self.restarts} restart{'s' if self.restarts > 1 else ''}"
        if self.is_local:
            return f"{self.number}{again}"
        return f"{self.type}, {self.number} with at most {self.ranks_per_machine} ranks of a role each{again}"

    def _problems(self) -> Iterator[str]:
        if not self.is_local and self.ranks_per_machine is None:
            yield "type 'ray' needs ranks_per_machine, as a rule the number of accelerators of a machine"
        for name, field in type(self).model_fields.items() if self.is_local else ():
            default = field.get_default(call_default_factory=True)
            if name not in ("type", "restarts") and getattr(self, name) != default:
                yield f"type 'local' has no use for {name!r}, which is of 'ray'; leave it out"


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
