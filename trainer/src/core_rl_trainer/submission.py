"""``core-rl submit``: a job of Slurm that trains a recipe."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from core_rl.backend.meta import Scheduling
from core_rl.config.engine import EngineConfig, InferenceEngineConfig
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError
from core_rl.launch.hosts import Slot
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.plan.run_plan import EnginePlan, RunPlan
from core_rl_trainer.recipe.cluster import SchedulingSection
from core_rl_trainer.recipe.recipe import load_recipe

if TYPE_CHECKING:
    from core_rl_cluster.sbatch import BatchJob

__all__ = ["MachineRequest", "machine_request", "submit"]

Device = Literal["auto", "cpu", "cuda"]

PLAIN = ("partition", "account", "qos", "nodelist", "exclude", "begin", "deadline")
"""Fields of the section ``cluster.scheduling`` that are options of ``sbatch`` under the same names."""


@dataclass(frozen=True, kw_only=True)
class MachineRequest:
    """The machines of a job, and the resources of each; 0 leaves an amount to Slurm's defaults."""

    machines: int
    cpu: int
    gpu: int
    memory_mib: int | None
    """None where neither recipe nor engines set it; 0 is all of a machine."""
    env: Mapping[str, str]


def submit(path: Path, overrides: Sequence[str]) -> tuple[BatchJob, MachineRequest]:
    """Have Slurm train the recipe in ``path`` with dotted ``overrides``, from this directory.

    Raises `ConfigError` for errors of the recipe, without ``sbatch``, and with its message where it refuses.
    """
    _check_type(path, overrides)
    changes = [*overrides, "cluster.type=slurm"]
    recipe = load_recipe(path, changes)
    # This machine need not have the devices of the job.
    plan = resolve(recipe.model_copy(update={"device": "auto"}), driver_here=False)
    request = machine_request(plan, recipe.device)
    if names := dict.fromkeys([*recipe.cluster.environment, *request.env]):
        changes.append(f"cluster.environment=[{', '.join(names)}]")
    from core_rl_cluster.sbatch import submit_job

    command = [sys.executable, "-m", "core_rl.cli", "train", str(path.absolute()), *changes]
    options = [*(["--no-kill"] if recipe.cluster.restarts else []), *recipe.cluster.scheduling.options]
    job = submit_job(
        recipe.directory, command, request.env, _request(request, recipe.cluster.scheduling), options
    )
    return job, request


def _check_type(path: Path, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a recipe whose machines are not Slurm's."""
    section = apply_overrides(load_yaml(path), overrides).get("cluster")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if kind not in (None, "local", "slurm"):
        raise ConfigError(
            f"cluster.type = {kind!r}: core-rl submit is for Slurm; start such a run with core-rl train"
        )


def machine_request(plan: RunPlan, device: Device) -> MachineRequest:
    """The amounts for each machine, by default the needs of engines on ``device`` on the machine with the most."""
    scheduling = plan.cluster.scheduling
    roles = [_need(engine, device) for engine in plan.engines.values()]
    machines = range(plan.cluster.machines)
    cpu = max(sum(role.unit.cpu * role.processes[number] for role in roles) for number in machines)
    memory = max(sum(role.unit.memory_mib * role.engines[number] for role in roles) for number in machines)
    gpu = max((slot.device + 1 for role in roles if role.unit.gpu for slot in role.slots), default=0)
    known = all(role.unit.memory_mib for role in roles)
    env = {name: value for role in roles for name, value in role.unit.env}
    return MachineRequest(
        machines=plan.cluster.machines,
        cpu=scheduling.cpu or cpu + 1,  # the driver
        gpu=gpu if scheduling.gpu is None else scheduling.gpu,
        memory_mib=(memory if known else None) if scheduling.memory_mib is None else scheduling.memory_mib,
        env=env | dict(scheduling.env),
    )


@dataclass(frozen=True, kw_only=True)
class _Need:
    """Resources of a role."""

    unit: Scheduling
    """One rank, or one server."""
    engines: Counter[int]
    """Ranks or servers by machine."""
    processes: Counter[int]
    """The same, without ranks in processes of another role."""
    slots: Sequence[Slot]


def _need(engine: EnginePlan[EngineConfig], device: Device) -> _Need:
    config = engine.config.model_copy(update={"device": device})
    unit = load_engine(engine.spec, config).get_scheduling_config()
    if isinstance(config, InferenceEngineConfig):  # servers next to the driver
        servers = Counter({0: config.layout.dp})
        slots = [Slot(0, number) for number in config.own_devices]
        return _Need(unit=unit, engines=servers, processes=servers, slots=slots)
    ranks = Counter(slot.machine for slot in engine.slots)
    processes = Counter[int]() if engine.colocated_with else ranks
    return _Need(unit=unit, engines=ranks, processes=processes, slots=engine.slots)


def _request(request: MachineRequest, scheduling: SchedulingSection) -> dict[str, object]:
    """The options of ``sbatch`` by name."""
    memory = request.memory_mib
    return {
        "nodes": request.machines,
        "cpus-per-task": request.cpu,
        "gpus-per-node": request.gpu or None,
        "mem": f"{memory}M" if memory else memory,
        "time": scheduling.time_limit,
        **{name: getattr(scheduling, name) for name in PLAIN},
    }
