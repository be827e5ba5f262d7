"""`resolve`: the plan of a run from its recipe, after the checks that need no engine.

Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.checkpoint.model_files import WeightFiles, check_weight_files, git_lfs_pointers, no_weights
from core_rl.config.engine import MOMENT_BYTES, OptimizerConfig
from core_rl.config.secret import unset_references
from core_rl.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, raise_all
from core_rl.launch.hosts import load_hosts
from core_rl.registry.engines import engine_names
from core_rl_trainer.outputs.run_files import require_free_directory
from core_rl_trainer.plan.engine_config import EngineSections
from core_rl_trainer.recipe.recipe import Recipe

if TYPE_CHECKING:
    from core_rl_trainer.plan.run_plan import RunPlan

CLOSE = 1.25
"""A disk with less than this times the bytes of a run is worth a remark."""


def resolve(recipe: Recipe) -> RunPlan:
    """Check ``recipe``, read its data, and decide on everything that the run needs. Nothing is started or written.

    Raises `ConfigError` with every problem, before torch is imported where a check needs no torch.
    """
    engines = EngineSections(sections=recipe.engines, shared=recipe.engine_fields)
    trained = engines.configure_trained(recipe.engine, recipe.model, recipe.optimizer)
    remarks = preflight(recipe)
    from core_rl_trainer.plan.build import PlanBuilder

    return PlanBuilder(recipe, engines).build(trained, remarks)


def preflight(recipe: Recipe) -> tuple[str, ...]:
    """Remarks on ``recipe``, after all checks that need no engine. Raises one `ConfigError` with every problem."""
    used = (recipe.engine, recipe.rollout.engine)
    problems = [*_engine_problems(recipe.engines, used)]
    started = {name: section for name, section in recipe.engines.items() if name in used}
    problems += unset_references(recipe.model_dump() | {"engines": started})
    with _added_to(problems):
        require_free_directory(recipe.directory)
    with _added_to(problems, f"cluster.type = {recipe.cluster.type!r}: "):
        if not recipe.cluster.is_local:
            load_hosts(recipe.cluster.type)
    models = recipe.model_directories
    if recipe.model.lora is not None and recipe.model.lora.path is not None:
        models["model.lora.path"] = recipe.model.lora.path
    weights: dict[str, WeightFiles] = {}
    for name, path in models.items():
        with _added_to(problems, f"{name} = {path!r}: "):
            weights[name] = _weights(path, "adapter_model" if name == "model.lora.path" else "model")
    raise_all(ConfigError, "recipe", problems)
    optimizers = {"model.path": None if recipe.model.lora is not None else recipe.optimizer}
    if recipe.critic is not None:
        optimizers["critic.path"] = recipe.critic.optimizer
        weights.setdefault("critic.path", weights["model.path"])
    checkpoints = max(1, min(recipe.keep, -(-recipe.steps // recipe.save_every)))  # steps = 0: epochs
    saved = checkpoints * (2 if recipe.save_portable_every else 1)
    needed = saved * _state_bytes(weights, optimizers) + weights["model.path"].size
    remarks = list(_disk_remarks(recipe.directory, needed))
    if unread := [name for name in recipe.engines if name not in used]:
        engines = " and ".join(dict.fromkeys(used))
        remarks.insert(
            0, f"engines.{', engines.'.join(unread)} not read: the engines of this recipe are {engines}"
        )
    return tuple(remarks)


def _engine_problems(sections: Collection[str], used: Collection[str]) -> Iterator[str]:
    unknown = [name for name in sections if name not in used]
    known = engine_names() if unknown else []
    for name in unknown:
        if name not in known:
            close = difflib.get_close_matches(name, [*used, *known], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the engines are {', '.join(known)}"
            yield f"engines.{name}: no engine is called {name!r}; {hint}"


@contextmanager
def _added_to(problems: list[str], subject: str = "") -> Iterator[None]:
    """Inside the context, a `ConfigError` is added to ``problems``, behind its ``subject``."""
    try:
        yield
    except ConfigError as error:
        problems.append(f"{subject}{error}")


def _weights(path: str, prefix: str) -> WeightFiles:
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError("there is no such directory; name one with weights in safetensors files")
    try:
        weights = check_weight_files(directory, prefix)
    except CheckpointNotFound as error:
        raise ConfigError(no_weights(directory)) from error
    except CheckpointDamaged as error:
        raise ConfigError(str(error).removeprefix(f"{directory}: ")) from error
    if pointers := git_lfs_pointers(directory):
        raise ConfigError(f"{', '.join(pointers[:3])}: a pointer of Git LFS, not the file; run: git lfs pull")
    return weights


def _disk_remarks(directory: Path, needed: float) -> Iterator[str]:
    """A remark where the disk is almost too small; raises `ConfigError` where a new run surely does not fit."""
    if any((directory / "checkpoints").glob("*")):
        return  # much of it is written already
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    subject = (
        f"output_dir = {str(directory)!r}: checkpoints and exports take about {_gib(needed)}, and {_gib(free)} are "
        "free there; lower keep, or name a directory on a larger disk"
    )
    if free < needed:
        raise ConfigError(subject)
    if free < CLOSE * needed:
        yield subject


def _state_bytes(
    weights: Mapping[str, WeightFiles], optimizers: Mapping[str, OptimizerConfig | None]
) -> float:
    """A lower bound of the bytes of one run checkpoint; nothing is counted for an adapter."""
    return sum(
        (4 + MOMENT_BYTES[optimizer.type]) * weights[name].parameters
        for name, optimizer in optimizers.items()
        if optimizer is not None
    )


def _gib(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {name}"
