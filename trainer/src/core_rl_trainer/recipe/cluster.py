"""The section ``cluster`` of a recipe: the machines of a run, and the request to a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from core_rl.config.base import Config
from core_rl.config.layout import ParallelLayout
from core_rl.config.paths import LocalPath

__all__ = ["ClusterSection", "ClusterType", "SchedulingSection"]

ClusterType = Literal["local", "ray", "slurm", "attach"]

ATTACH_PORT = 29700
"""The default port of `core_rl_cluster.AttachHosts`."""

Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
"""Text that fits into one line of a script."""
Duration = Annotated[Line, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""A time as ``sbatch`` reads it; a bare number is in minutes."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

OF_AGENTS = frozenset(
    {"machines", "ranks_per_machine", "address", "port", "wait_s", "lease_s", "environment"}
)
"""Fields of every type that has an agent on each machine."""
USED: dict[ClusterType, frozenset[str]] = {
    "local": frozenset({"restarts"}),
    "ray": OF_AGENTS | {"restarts", "layouts"},
    "slurm": OF_AGENTS | {"restarts", "layouts", "scheduling"},
    "attach": OF_AGENTS | {"restarts", "layouts", "key_file"},
}
"""The fields that each type reads, besides ``type``."""


class SchedulingSection(Config):
    """A request of ``core-rl submit`` to Slurm, with the names of ``sbatch``. Amounts are per machine.

    By default CPUs, GPUs and memory follow from the engines (`core_rl.backend.meta.Scheduling`).
    """

    cpu: int | None = Field(default=None, ge=1)
    """CPU cores."""
    gpu: int | None = Field(default=None, ge=0)
    """GPUs."""
    memory_mib: int | None = Field(default=None, ge=0)
    """Memory in MiB; 0 is all of a machine."""
    partition: Line | None = None
    """The partition, or several with commas between them."""
    account: Line | None = None
    """The account that pays."""
    qos: Line | None = None
    """The quality of service."""
    nodelist: Line | None = None
    """Machines that the job must include, such as ``node[1-4]``."""
    exclude: Line | None = None
    """Machines that may not."""
    container_image: Line | None = None
    """The image that ranks run in, with the driver's versions of core-rl and torch; needs Slurm's plugin pyxis."""
    env: dict[VariableName, Line] = Field(default_factory=dict)
    """Environment variables of the driver and of all ranks."""
    time_limit: Duration | None = None
    """After how long the job is ended: minutes, ``hours:minutes:seconds`` or ``days-hours``. The run saves a checkpoint
    two minutes before."""
    begin: Duration | None = None
    """The earliest start, such as ``now+1hour`` or ``2026-01-31T08:00:00``."""
    deadline: Duration | None = None
    """The latest end; a job that cannot meet it is not started."""
    options: tuple[Annotated[str, Field(pattern=r"^--[^\r\n]+$")], ...] = ()
    """Further options of ``sbatch``, such as ``--constraint=h200``."""


class ClusterSection(Config):
    """The machines on which ranks run. Their number and addresses may change when a run is resumed."""

    type: ClusterType = "local"
    """``local``: this machine. ``ray`` and ``slurm`` start an agent on each machine; with ``attach`` the agents were
    started otherwise (torchrun, Kubernetes, ssh), as ``core-rl agent --driver HOST:PORT``."""
    machines: int = Field(default=1, ge=1)
    """The number of machines, which are numbered from 0."""
    ranks_per_machine: int | None = Field(default=None, ge=1)
    """The largest number of ranks of one role on each machine: as a rule, its accelerators."""
    address: Line | None = None
    """The address of this machine under which the others reach it; null finds it."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port that agents and ranks connect to; 0 takes a free one, and 29700 for ``attach``."""
    wait_s: float = Field(default=300.0, gt=0.0)
    """The longest wait for all machines, in seconds."""
    lease_s: float = Field(default=30.0, gt=0.0)
    """After so many seconds without a sign of life a machine counts as lost, and its ranks end by themselves."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables, by name, that ranks get from this machine, besides the usual ones."""
    key_file: LocalPath | None = None
    """For ``attach``: the file with the key of the agents; null reads the variable ``CORE_RL_CLUSTER_KEY``."""
    restarts: int = Field(default=0, ge=0)
    """Number of restarts from the last checkpoint after lost ranks or machines."""
    layouts: dict[int, ParallelLayout] = Field(default_factory=dict)
    """Layouts of the train engine after a restart, by a smaller number of machines."""
    scheduling: SchedulingSection = SchedulingSection()
    """For ``slurm``: the request of ``core-rl submit``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := [*self._unused(), *self._missing(), *self._misfit_layouts()]:
            raise ValueError("; ".join(problems))
        return self

    @property
    def agent_port(self) -> int:
        """The port that agents connect to; 0 takes a free one."""
        return self.port or (ATTACH_PORT if self.type == "attach" else 0)

    def on_machines(self, count: int) -> Self:
        """The section for a restart on the first ``count`` machines."""
        fewer = {number: layout for number, layout in self.layouts.items() if number < count}
        return self.model_copy(update={"machines": count, "layouts": fewer})

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine, without agents."""
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
        layouts = "".join(f", {layout} on {count}" for count, layout in sorted(self.layouts.items()))
        return f"{self.type}, {self.number} with at most {self.ranks_per_machine} ranks of a role each{again}{layouts}"

    def _unused(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if name != "type" and name not in USED[self.type] and getattr(self, name) != default:
                useful = [kind for kind in USED if name in USED[kind]]
                yield f"type {self.type!r} has no use for {name!r}, which is of {' and '.join(useful)}; leave it out"

    def _missing(self) -> Iterator[str]:
        if self.is_local:
            return
        if self.ranks_per_machine is None:
            yield f"type {self.type!r} needs ranks_per_machine, as a rule the number of accelerators of a machine"

    def _misfit_layouts(self) -> Iterator[str]:
        if self.layouts and not self.restarts:
            yield "layouts are those after a restart, and restarts = 0; set restarts, or leave layouts out"
        for count, layout in self.layouts.items():
            if not 0 < count < self.machines:
                yield f"layouts.{count}: machines = {self.machines}; a layout is for a smaller number of machines"
            elif self.ranks_per_machine is not None and layout.world_size > count * self.ranks_per_machine:
                yield (
                    f"layouts.{count}: {layout} has {layout.world_size} ranks, and {count} x ranks_per_machine = "
                    f"{self.ranks_per_machine} has room for {count * self.ranks_per_machine}"
                )
