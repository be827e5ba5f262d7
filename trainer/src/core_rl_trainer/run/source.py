"""``resume_from``: the checkpoint of another run, from which a new run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints, open_run_checkpoint
from core_rl.errors import ConfigError, CoreRLError, ExitCode, RunStopped, raise_all
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.plan.run_plan import RunFiles


def find_source(files: RunFiles, steps: int, identity: Callable[[], RunIdentity]) -> RunCheckpoint | None:
    """The verified checkpoint from which a run of ``steps`` steps starts; None where it has no other run to start from.

    A run that has a checkpoint of its own resumes from that. ``identity()`` is the identity of the run, which takes a
    read of all data files. Raises `ConfigError` where ``resume_from`` holds no checkpoint, is the run itself, or is of
    a run with other data or another model.
    """
    if files.resume_from is None or _has_begun(files):
        return None
    path = Path(files.resume_from)
    subject = f"resume_from = {files.resume_from!r}"
    if files.directory.resolve() in (path.resolve(), *path.resolve().parents):
        raise ConfigError(
            f"{subject} is the run in output_dir itself, which the same command resumes without it; set output_dir to "
            "another directory"
        )
    checkpoint = _open(path, subject)
    if "run" not in checkpoint.state:
        raise ConfigError(
            f"{subject}: {checkpoint.path} was written by an earlier version; resume that run once"
        )
    origin = RunIdentity(**checkpoint.state["run"])
    shared = f"{subject}: a run that starts from another one shares its model and the order of its data, and differs in"
    raise_all(ConfigError, shared, origin.refused_start(identity()))
    if steps < checkpoint.step:
        raise ConfigError(
            f"steps = {steps}, and {subject} is of step {checkpoint.step}, from which the run counts on; set "
            f"steps above {checkpoint.step}"
        )
    return checkpoint


def _has_begun(files: RunFiles) -> bool:
    return bool(RunCheckpoints(files.directory / "checkpoints", files.keep).steps()) and not files.fresh


def _open(path: Path, subject: str) -> RunCheckpoint:
    if not path.is_dir():
        raise ConfigError(
            f"{subject}: there is no such directory; name that of a run, or of one of its checkpoints"
        )
    checkpoint = open_run_checkpoint(path)
    if checkpoint is None:
        checkpoint = RunCheckpoints(path / "checkpoints", keep=1).latest()
    if checkpoint is None:
        raise ConfigError(
            f"{subject} holds no complete checkpoint; name the directory of a run that has one, or of one checkpoint"
        )
    return checkpoint


def resume_hint(directory: Path, fresh: bool) -> str:
    """The effect of the same command on the interrupted run in ``directory``; ``fresh`` would delete the run."""
    steps = RunCheckpoints(directory / "checkpoints", keep=1).steps()
    if not steps:
        return "there is no checkpoint yet, and the same command starts from the beginning"
    command = "the same command without fresh=true" if fresh else "the same command"
    return f"{command} resumes from the checkpoint of step {steps[-1]}"


@contextmanager
def failures_with_hint(directory: Path, fresh: bool) -> Iterator[None]:
    """Add `resume_hint` to an error that ends a run which had begun."""
    try:
        yield
    except CoreRLError as error:
        if error.exit_code == ExitCode.FAILED and not isinstance(error, RunStopped):
            error.add_note(resume_hint(directory, fresh))
        raise
