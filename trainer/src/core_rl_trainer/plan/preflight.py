"""Checks that need no engine and no torch: the first of a run, and of ``--dry-run``, ``init`` and ``submit``."""

from __future__ import annotations

import difflib
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.checkpoint.model_files import (
    WeightFiles,
    check_weight_files,
    git_lfs_pointers,
    pickled_weights,
)
from core_rl.config.engine import MOMENT_BYTES, OptimizerConfig
from core_rl.config.secret import unset_references
from core_rl.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, raise_all
from core_rl.launch.hosts import load_hosts
from core_rl.registry.engines import engine_names
from core_rl_trainer.outputs.run_lock import require_free_directory
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["preflight"]

CLOSE = 1.25
"""A disk with less than this times the bytes of a run is worth a remark."""


def preflight(recipe: Recipe, *, driver_here: bool = True) -> tuple[str, ...]:
    """Remarks on ``recipe``, after all checks that need no engine.

    Without ``driver_here`` the run starts on another machine, whose ports are not checked. Raises one `ConfigError`
    with every problem.
    """
    problems = [*_engine_problems(recipe.engines, (recipe.engine, recipe.rollout.engine))]
    problems += unset_references(_read_sections(recipe), recipe.cluster.scheduling.env)
    problems += _directory_problems(recipe.directory)
    problems += _cluster_problems(recipe.cluster)
    if driver_here:
        problems += _port_problems(recipe.cluster)
    models = {name: path for name, path in _model_directories(recipe).items() if path is not None}
    weights: dict[str, WeightFiles] = {}
    for name, path in models.items():
        try:
            weights[name] = _weights(path, "adapter_model" if name == "model.lora.path" else "model")
        except ConfigError as error:
            problems.append(f"{name} = {path!r}: {error}")
    raise_all(ConfigError, "recipe", problems)
    return (*_unread_sections(recipe), *_disk_remarks(recipe, weights))


# ------------------------------------------------------------------------------- sections of engines


def _engine_problems(sections: Collection[str], used: Collection[str]) -> Iterator[str]:
    unknown = [name for name in sections if name not in used]
    known = engine_names() if unknown else []
    for name in unknown:
        if name not in known:
            close = difflib.get_close_matches(name, [*used, *known], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the engines are {', '.join(known)}"
            yield f"engines.{name}: no engine is called {name!r}; {hint}"


def _unread_sections(recipe: Recipe) -> Iterator[str]:
    used = dict.fromkeys((recipe.engine, recipe.rollout.engine))
    if ignored := [name for name in recipe.engines if name not in used]:
        yield f"engines.{', engines.'.join(ignored)} not read: the engines of this recipe are {' and '.join(used)}"


def _read_sections(recipe: Recipe) -> dict[str, Any]:
    """The values of ``recipe``, without sections of engines that the run does not start."""
    used = (recipe.engine, recipe.rollout.engine)
    engines = {name: section for name, section in recipe.engines.items() if name in used}
    return recipe.model_dump() | {"engines": engines}


# -------------------------------------------------------------------------- directories and ports


def _directory_problems(directory: Path) -> Iterator[str]:
    try:
        require_free_directory(directory)
    except ConfigError as error:
        yield str(error)


def _cluster_problems(cluster: ClusterSection) -> Iterator[str]:
    try:
        if not cluster.is_local:
            load_hosts(cluster.type)
    except ConfigError as error:
        yield f"cluster.type = {cluster.type!r}: {error}"


def _port_problems(cluster: ClusterSection) -> Iterator[str]:
    if cluster.is_local or not cluster.agent_port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", cluster.agent_port))
        except OSError as error:
            yield f"cluster.port = {cluster.agent_port}: {error.strerror}; choose another port"


# ----------------------------------------------------------------------------------------- weights


def _model_directories(recipe: Recipe) -> dict[str, str | None]:
    """Directories of weights by their fields."""
    return {
        "model.path": recipe.model.path,
        "model.lora.path": recipe.model.lora.path if recipe.model.lora is not None else None,
        "critic.path": recipe.critic.path if recipe.critic is not None else None,
        "reward_model.path": recipe.reward_model.path if recipe.reward_model is not None else None,
    }


def _weights(path: str, prefix: str) -> WeightFiles:
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError("there is no such directory; name one with weights in safetensors files")
    try:
        weights = check_weight_files(directory, prefix)
    except CheckpointNotFound as error:
        reason = "there are no weights in it; download the model with its *.safetensors files"
        if pickled := pickled_weights(directory):
            reason = (
                f"its weights are pickled ({', '.join(pickled[:3])}), and unpickling can run any code; load it once in "
                "transformers and call save_pretrained(), which writes safetensors"
            )
        raise ConfigError(reason) from error
    except CheckpointDamaged as error:
        raise ConfigError(str(error).removeprefix(f"{directory}: ")) from error
    if pointers := git_lfs_pointers(directory):
        raise ConfigError(f"{', '.join(pointers[:3])}: a pointer of Git LFS, not the file; run: git lfs pull")
    return weights


# -------------------------------------------------------------------------------------------- disk


def _disk_remarks(recipe: Recipe, weights: Mapping[str, WeightFiles]) -> Iterator[str]:
    """A remark where the disk is almost too small; raises `ConfigError` where a new run surely does not fit."""
    nearest = next(path for path in (recipe.directory, *recipe.directory.absolute().parents) if path.exists())
    if any((recipe.directory / "checkpoints").glob("*")):
        return  # much of it is written already
    needed, free = _saved_bytes(recipe, weights), shutil.disk_usage(nearest).free
    subject = (
        f"output_dir = {recipe.output_dir!r}: checkpoints and exports take about {_gib(needed)}, and {_gib(free)} are "
        "free there; lower keep, or name a directory on a larger disk"
    )
    if free < needed:
        raise ConfigError(subject)
    if free < CLOSE * needed:
        yield subject


def _saved_bytes(recipe: Recipe, weights: Mapping[str, WeightFiles]) -> float:
    """A lower bound of the bytes that the run holds in ``output_dir`` at its end."""
    model, critic = weights["model.path"], weights.get("critic.path", weights["model.path"])
    checkpoints = max(1, min(recipe.keep, -(-recipe.steps // recipe.save_every)))  # steps = 0: epochs
    state = 0.0 if recipe.model.lora is not None else _state_bytes(model, recipe.optimizer)
    if recipe.critic is not None:
        state += _state_bytes(critic, recipe.critic.optimizer)
    portable = 2 if recipe.save_portable_every else 1
    return checkpoints * portable * state + model.size


def _state_bytes(weights: WeightFiles, optimizer: OptimizerConfig) -> float:
    return (4 + MOMENT_BYTES[optimizer.type]) * weights.parameters


def _gib(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {name}"
