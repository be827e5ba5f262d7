"""The directory of a run: its files, its lock, the run that it belongs to, and the run that it starts from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from core_rl.checkpoint.copies import CheckpointCopies
from core_rl.checkpoint.directory import LocalStorage
from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints, open_run_checkpoint
from core_rl.errors import CheckpointError, ConfigError, CoreRLError, ExitCode, RunStopped, raise_all
from core_rl_trainer.logs.metrics_log import read_steps
from core_rl_trainer.outputs.run_files import (
    IDENTITY,
    LOG,
    METRICS,
    PAGE,
    PICTURE,
    RECIPE,
    RESTARTS,
    RESULT,
    STATUS,
    locked,
    read_json,
    replace_text,
)
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.plan.run_plan import RunFiles
from core_rl_trainer.recipe.recipe import HERE

OWNED = (
    RECIPE,
    IDENTITY,
    STATUS,
    RESULT,
    METRICS,
    LOG,
    RESTARTS,
    "samples.jsonl",
    "tensorboard",
    "wandb",
    ".wandb-run",
    "checkpoints",
    "weights",
    "model",
    "adapter",
    "best",
    "best_model",
    PICTURE,
    PAGE,
    "reference",
    "doctor",
)
HEAD = """\
# The recipe of the run in this directory, with all defaults.
# {here} is the directory of this file: the run goes on wherever it is moved to.
"""

REMEDY = (
    "Set output_dir to another directory for a run of its own (resume_from=DIR starts it from a checkpoint of this "
    "one), or fresh=true to delete this one. Not to be changed"
)


@contextmanager
def open_run_directory(files: RunFiles, identity: RunIdentity) -> Iterator[RunDirectory]:
    """The directory of the run with this ``identity``, for this process alone.

    Raises `ConfigError` where nothing can be written, when another process is at work there, and for a run of another
    recipe, with the fields that may not change. Errors of ``resume_from`` come before anything is written.
    """
    source = find_source(files, identity.recipe["steps"], lambda: identity)
    with locked(files.directory):
        yield RunDirectory(files, identity, source)


class RunDirectory:
    """The files of a run; made by `open_run_directory`."""

    def __init__(self, files: RunFiles, identity: RunIdentity, source: RunCheckpoint | None = None) -> None:
        """``source`` is the checkpoint of another run from which a new one starts."""
        self.path = files.directory
        self.weights = self.path / "weights"
        """The directory through which weights go to the rollout engine; removed by `transfer`."""
        self.rendezvous = self.weights.with_suffix(".rendezvous")
        """The file through which sender and receiver of weights meet, where no weights go through the disk."""
        self.judged = self.path / "doctor"
        """The model that the doctor judges the engines by; removed by `transfer`."""
        self.model = self.path / "model"
        """The trained model in Hugging Face format."""
        self.adapter = self.path / "adapter"
        """The trained adapter in the layout of ``peft``, of a run with ``model.lora``."""
        self.best = self.path / "best"
        """The directory with the model of the best evaluation."""
        self.best_model = self.path / "best_model"
        """A link to that model."""
        self.log = self.path / LOG
        """The lines of the terminal."""
        self.page = self.path / PAGE
        """The page that shows the run."""
        url = files.checkpoint_url
        self._copies = CheckpointCopies(url, files.keep) if url is not None else None
        if files.fresh:
            self._clear()
            if self._copies is not None:
                self._copies.clear()
        self.checkpoints = RunCheckpoints(self.path / "checkpoints", files.keep)
        if self._copies is not None:
            self._copies.download(self.checkpoints)
        self._source = source
        self.identity = self._claim(identity)
        """Identity for comparison with a later resume."""

    @property
    def schedule_steps(self) -> int:
        """The last step of a decaying learning rate: the steps of the run when it began."""
        return self.identity.schedule_steps

    def checkpoint(self) -> RunCheckpoint | None:
        """The checkpoint to resume from: the newest of this run, else of its source."""
        return self.checkpoints.latest() or self._source

    def copy_checkpoint(self, step: int) -> None:
        """Copy the checkpoint of ``step`` to ``checkpoint_url``, where it is missing or was saved again."""
        if self._copies is not None:
            self._copies.upload(step, self.checkpoints.at(step).path)

    def reference(self, name: str) -> Path:
        """The file of the reference's log-probs of the training data (``train``) or the evaluation data (``eval``)."""
        directory = self.path / "reference"
        directory.mkdir(exist_ok=True)
        return directory / f"{name}.safetensors"

    def owns(self, checkpoint: RunCheckpoint) -> bool:
        """Whether ``checkpoint`` belongs to this run, not to its source."""
        return checkpoint.path.parent == self.checkpoints.root

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, with the present places of its files; None before."""
        result = read_json(self.path / RESULT)
        places = {name: place for name, place in self.places().items() if result.get(name)}
        return result | places if result else None

    def places(self) -> dict[str, str]:
        """The files of a finished run, by their names in its result."""
        return {
            "output_dir": str(self.path),
            "model": str(self.model),
            "adapter": str(self.adapter),
            "best_model": str(self.best_model),
            "metrics": str(self.path / METRICS),
            "page": str(self.page),
            "picture": str(self.path / PICTURE),
        }

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """On leaving, the files through which weights go are removed: a run that resumes writes them again."""
        try:
            yield
        finally:
            for directory in (self.weights, self.judged):
                LocalStorage(str(directory)).remove()
            self.rendezvous.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Remove the result of a finished run, which is extended."""
        (self.path / RESULT).unlink(missing_ok=True)

    def write_page(self, page: str, picture: str | None) -> None:
        """Replace the page and the picture atomically."""
        self._write(PAGE, page)
        if picture is not None:
            self._write(PICTURE, picture)

    def write_status(self, status: str, problem: str) -> None:
        """Record whether the run is ``running``, ``stopped`` or ``complete``, and the ``problem`` that stopped it."""
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        values = {
            "status": status,
            "problem": problem,
            "started": read_json(self.path / STATUS).get("started", now),
            "updated": now,
        }
        self._write(STATUS, json.dumps(values, indent=2) + "\n")

    def add_restart(self, row: Mapping[str, Any]) -> None:
        with (self.path / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def restarts(self) -> list[dict[str, Any]]:
        return read_steps(self.path / RESTARTS)

    def finish(self, result: dict[str, Any]) -> None:
        """Record that the run is complete; the last thing that a run does."""
        self._write(RESULT, json.dumps(result, indent=2) + "\n")

    def _claim(self, now: RunIdentity) -> RunIdentity:
        """The identity of the run that is here, or begins here; raises `ConfigError` where ``now`` is another one."""
        before, steps = recorded_identity(self.path), self.checkpoints.steps()
        if before is None and (copied := self.checkpoints.latest()) is not None:  # from checkpoint_url
            before = RunIdentity(**copied.state["run"])
        if before is not None:
            if not (steps or _has_steps(self.path)) and before.refused_changes(now):
                self._clear()
            else:
                refuse_other_run(self.path, before, now)
        origin = before
        if not steps:  # it begins now, or again
            origin = RunIdentity(**self._source.state["run"]) if self._source is not None else None
        if origin is not None:
            now = replace(now, schedule_steps=origin.schedule_steps)
        self._write(IDENTITY, json.dumps(now.without_recipe(), indent=2))
        self._write(RECIPE, HEAD + yaml.safe_dump({**now.recipe, "output_dir": HERE}, sort_keys=False))
        return now

    def _write(self, name: str, text: str) -> None:
        """Replace the file ``name``. Raises `CheckpointError` where it cannot be written; it is as before then."""
        try:
            replace_text(self.path / name, text)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / name}: {error.strerror}; free space or make the directory writable"
            ) from error

    def _clear(self) -> None:
        """Remove the files of a run, and nothing else; the recipe last, since it identifies the others."""
        for name in reversed(OWNED):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def recorded_identity(path: Path) -> RunIdentity | None:
    """The identity of the run in the directory ``path``."""
    if not (path / RECIPE).is_file():
        return None
    recipe = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
    identity = read_json(path / IDENTITY) or {"schedule_steps": recipe["steps"], "data": {}, "files": {}}
    return RunIdentity(recipe=recipe, **identity)


def refuse_other_run(path: Path, before: RunIdentity, now: RunIdentity) -> None:
    """Raise `ConfigError` where the run ``before`` in ``path`` cannot become ``now``, else as `latest` does."""
    checkpoints = RunCheckpoints(path / "checkpoints", keep=1)
    saved, steps = checkpoints.steps(), now.recipe["steps"]
    if saved or _has_steps(path):
        raise_all(ConfigError, f"{path} holds another run. {REMEDY}", before.refused_changes(now))
    if saved and steps < saved[-1]:
        raise ConfigError(
            f"steps = {steps}, and the run in {path} has a checkpoint of step {saved[-1]}; set steps to {saved[-1]} or "
            "more, or remove the later checkpoints to go back"
        )
    if not saved and steps != before.recipe["steps"] and (path / RESULT).is_file():
        raise ConfigError(
            f"steps = {steps}, and the complete run in {path} has no checkpoint any more from which it could go on; "
            "set output_dir to another directory, or fresh=true"
        )
    checkpoints.latest()


def _has_steps(path: Path) -> bool:
    """Whether a run without checkpoints took a step: a run that failed before has nothing to lose."""
    rows = read_steps(path / METRICS)
    return (path / RESULT).is_file() or any((row.get("step") or 0) > 0 for row in rows)


def find_source(files: RunFiles, steps: int, identity: Callable[[], RunIdentity]) -> RunCheckpoint | None:
    """The verified checkpoint from which a run of ``steps`` steps starts; None where it has no other run to start from.

    A run that has a checkpoint of its own resumes from that. ``identity()`` is the identity of the run, which takes a
    read of all data files. Raises `ConfigError` where ``resume_from`` holds no checkpoint, is the run itself, or is of
    a run with other data or another model.
    """
    if files.resume_from is None:
        return None
    if RunCheckpoints(files.directory / "checkpoints", files.keep).steps() and not files.fresh:
        return None
    path = Path(files.resume_from)
    subject = f"resume_from = {files.resume_from!r}"
    if files.directory.resolve() in (path.resolve(), *path.resolve().parents):
        raise ConfigError(
            f"{subject} is the run in output_dir itself, which the same command resumes without it; set output_dir to "
            "another directory"
        )
    checkpoint = _open(path, subject)
    origin = RunIdentity(**checkpoint.state["run"])
    shared = f"{subject}: a run that starts from another one shares its model and the order of its data, and differs in"
    raise_all(ConfigError, shared, origin.refused_start(identity()))
    if steps < checkpoint.step:
        raise ConfigError(
            f"steps = {steps}, and {subject} is of step {checkpoint.step}, from which the run counts on; set "
            f"steps above {checkpoint.step}"
        )
    return checkpoint


def _open(path: Path, subject: str) -> RunCheckpoint:
    if not path.is_dir():
        raise ConfigError(
            f"{subject}: there is no such directory; name that of a run, or of one of its checkpoints"
        )
    checkpoint = open_run_checkpoint(path) or RunCheckpoints(path / "checkpoints", keep=1).latest()
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
