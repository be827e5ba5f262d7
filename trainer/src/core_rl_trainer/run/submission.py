"""``core-rl submit``: a job of Slurm that trains a recipe."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core_rl.backend.meta import Scheduling
from core_rl.config.engine import InferenceEngineConfig
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError
from core_rl_trainer.api import prepare
from core_rl_trainer.plan.preflight import preflight
from core_rl_trainer.plan.run_plan import PreparedRun
from core_rl_trainer.recipe.placement import RankSlot
from core_rl_trainer.recipe.recipe import Recipe, load_recipe

__all__ = ["MachineRequest", "Submission", "machine_request", "submit"]

SCRIPT = "submit.sh"
LOG = "slurm-%j.log"
NOTICE_S = 120
"""How long before the end of its time a job is told, so that it saves a checkpoint."""
SBATCH_S = 120.0
PLAIN = ("partition", "account", "qos", "nodelist", "exclude", "begin", "deadline")
"""Fields of the section ``cluster.scheduling`` that are options of ``sbatch`` under the same names."""


@dataclass(frozen=True, kw_only=True)
class MachineRequest:
    """The resources of one machine; 0 leaves an amount to Slurm's defaults."""

    cpu: int
    gpu: int
    memory_mib: int | None
    """None where the recipe and the engines do not say; 0 is all of a machine."""
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that Slurm has taken."""

    job: str
    script: Path
    log: Path
    request: MachineRequest
    machines: int


def submit(path: Path, overrides: Sequence[str]) -> Submission:
    """Have Slurm train the recipe in ``path`` with dotted ``overrides``, from this directory.

    Raises `ConfigError` for what is wrong in the recipe, without ``sbatch``, and with its message where it refuses.
    """
    _check_type(path, overrides)
    changes = [*overrides, "cluster.type=slurm"]
    recipe = load_recipe(path, changes)
    preflight(recipe, driver_here=False)
    # This machine need not have the devices of the job.
    prepared = prepare(recipe.model_copy(update={"device": "auto"}))
    request = machine_request(recipe, prepared)
    directory = recipe.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / SCRIPT
    script.touch(mode=0o700)
    script.write_text(job_script(recipe, request, path, changes), encoding="utf-8")
    job = _sbatch(script)
    return Submission(
        job=job,
        script=script,
        log=directory / LOG.replace("%j", job),
        request=request,
        machines=recipe.cluster.machines,
    )


def _check_type(path: Path, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a recipe whose machines are not Slurm's."""
    section = apply_overrides(load_yaml(path), overrides).get("cluster")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if kind not in (None, "local", "slurm"):
        raise ConfigError(
            f"cluster.type = {kind!r}: core-rl submit is for Slurm; start such a run with core-rl train"
        )


def machine_request(recipe: Recipe, prepared: PreparedRun) -> MachineRequest:
    """The recipe's amounts for each machine, and by default those of the engines on the machine with the most."""
    scheduling = recipe.cluster.scheduling
    roles = [_need(recipe, prepared, name) for name in prepared.roles]
    machines = range(recipe.cluster.machines)
    cpu = max(sum(role.each.cpu * role.processes[number] for role in roles) for number in machines)
    memory = max(sum(role.each.memory_mib * role.engines[number] for role in roles) for number in machines)
    gpu = max((slot.device + 1 for role in roles if role.each.gpu for slot in role.slots), default=0)
    known = all(role.each.memory_mib for role in roles)
    env = {name: value for role in roles for name, value in role.each.env}
    return MachineRequest(
        cpu=scheduling.cpu or cpu + 1,  # the driver
        gpu=gpu if scheduling.gpu is None else scheduling.gpu,
        memory_mib=(memory if known else None) if scheduling.memory_mib is None else scheduling.memory_mib,
        env=env | dict(scheduling.env),
    )


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What one role needs."""

    each: Scheduling
    """One rank, or one server."""
    engines: Counter[int]
    """By machine, its ranks or servers."""
    processes: Counter[int]
    """The same, without those in processes of another role."""
    slots: Sequence[RankSlot]


def _need(recipe: Recipe, prepared: PreparedRun, role: str) -> _Need:
    spec, config = prepared.roles[role]
    each = load_engine(spec, config.model_copy(update={"device": recipe.device})).get_scheduling_config()
    if isinstance(config, InferenceEngineConfig):  # servers next to the driver
        servers = Counter({0: config.layout.dp})
        slots = [RankSlot(0, device) for device in config.own_devices]
        return _Need(each=each, engines=servers, processes=servers, slots=slots)
    placement = prepared.placements[role]
    ranks = Counter(slot.machine for slot in placement.slots)
    own = Counter[int]() if placement.colocated_with else ranks
    return _Need(each=each, engines=ranks, processes=own, slots=placement.slots)


def job_script(recipe: Recipe, request: MachineRequest, path: Path, overrides: Sequence[str]) -> str:
    """The script that ``sbatch`` gets: it trains the recipe in ``path`` from this directory, with ``overrides``."""
    names = dict.fromkeys([*recipe.cluster.environment, *request.env])
    changes = [*overrides, *([f"cluster.environment=[{', '.join(names)}]"] if names else [])]
    command = [sys.executable, "-m", "core_rl.cli", "train", str(path.absolute()), *changes]
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by core-rl submit.",
            *(f"#SBATCH {option}" for option in _options(recipe, request)),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in request.env.items()),
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def _options(recipe: Recipe, request: MachineRequest) -> Iterator[str]:
    """The options of ``sbatch``, quoted as it reads them."""
    cluster, directory = recipe.cluster, recipe.directory.absolute()
    scheduling = cluster.scheduling
    chosen: dict[str, object] = {
        "job-name": f"core-rl {directory.name}",
        "nodes": cluster.machines,
        "ntasks-per-node": 1,
        "cpus-per-task": request.cpu,
        "gpus-per-node": request.gpu or None,
        "mem": None if request.memory_mib is None else f"{request.memory_mib}M" if request.memory_mib else 0,
        "time": scheduling.time_limit,
        **{name: getattr(scheduling, name) for name in PLAIN},
        "chdir": Path.cwd(),
        "output": directory / LOG,
        "signal": f"B:USR1@{NOTICE_S}",
    }
    for name, value in chosen.items():
        if value is not None:
            yield f"--{name}={shlex.quote(str(value))}"
    yield "--open-mode=append"
    if cluster.restarts:
        yield "--no-kill"  # a machine that is lost does not end the job
    yield from scheduling.options


def _sbatch(script: Path) -> str:
    """Hand ``script`` to Slurm; the number of the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            f"sbatch was not found: run core-rl submit on a login node of the Slurm cluster; the script is {script}"
        )
    command = [program, "--parsable", str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SBATCH_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"sbatch did not answer within {SBATCH_S:g} s; is Slurm's controller up (scontrol ping)? The script is "
            f"{script}"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"sbatch refused the job: {done.stderr.strip()}\nfix: change cluster.scheduling; the script is {script}"
        )
    return done.stdout.strip().partition(";")[0]
