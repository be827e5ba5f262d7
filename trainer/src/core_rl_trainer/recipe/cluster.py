"""The section ``cluster`` of a recipe: the machines of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from core_rl.config.base import Config

__all__ = ["ClusterSection", "ClusterType", "SchedulingSection"]

Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
"""Text that fits into one line."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

RETIRED = {
    "slurm": "a job of Slurm starts Ray on its machines, and the run has cluster.type = 'ray': see 'Under Slurm' in "
    "docs/many-machines.md",
    "attach": "start Ray on the machines, and set cluster.type = 'ray': see 'A Ray cluster' in docs/many-machines.md",
}
"""Types of before."""


def _without_retired(kind: object) -> object:
    if isinstance(kind, str) and kind in RETIRED:
        raise ValueError(f"there is no type {kind!r} any more; {RETIRED[kind]}")
    return kind


ClusterType = Annotated[Literal["local", "ray"], BeforeValidator(_without_retired)]


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
