"""``resume_from``: the checkpoint of another run, from which a new run starts."""

from __future__ import annotations

from pathlib import Path

from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints, open_run_checkpoint
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.identity import RunIdentity

__all__ = ["find_source"]


def find_source(recipe: Recipe, now: RunIdentity | None = None) -> RunCheckpoint | None:
    """The checkpoint that ``recipe.resume_from`` names, verified; None where there is none, or no need for it.

    ``now`` is the identity of ``recipe`` where it is known: making one reads all data files.
    A run that has a checkpoint of its own goes on from that. Raises `ConfigError` where the place holds no
    checkpoint, is the run itself, or is of a run with other data or another model.
    """
    if recipe.resume_from is None or _has_begun(recipe):
        return None
    path = Path(recipe.resume_from)
    subject = f"resume_from = {recipe.resume_from!r}"
    if recipe.directory.resolve() in (path.resolve(), *path.resolve().parents):
        raise ConfigError(
            f"{subject} is the run in output_dir itself, which the same command resumes without it; set output_dir to "
            "another directory"
        )
    checkpoint = _open(path, subject)
    if "run" not in checkpoint.state:
        raise ConfigError(
            f"{subject}: {checkpoint.path} was written by an earlier version; resume that run once"
        )
    begun = RunIdentity.from_dict(checkpoint.state["run"])
    shared = f"{subject}: a run that starts from another one shares its model and the order of its data, and differs in"
    raise_all(ConfigError, shared, begun.refused_start(now or RunIdentity.of(recipe)))
    if recipe.steps < checkpoint.step:
        raise ConfigError(
            f"steps = {recipe.steps}, and {subject} is of step {checkpoint.step}, from which the run counts on; set "
            f"steps above {checkpoint.step}"
        )
    return checkpoint


def _has_begun(recipe: Recipe) -> bool:
    own = RunCheckpoints(recipe.directory / "checkpoints", recipe.keep).steps()
    return bool(own) and not recipe.fresh


def _open(path: Path, subject: str) -> RunCheckpoint:
    if not path.is_dir():
        raise ConfigError(
            f"{subject}: there is no such directory; name that of a run, or of one of its checkpoints"
        )
    found = open_run_checkpoint(path)
    if found is None:
        found = RunCheckpoints(path / "checkpoints", keep=1).latest()
    if found is None:
        raise ConfigError(
            f"{subject} holds no complete checkpoint; name the directory of a run that has one, or of one checkpoint"
        )
    return found
