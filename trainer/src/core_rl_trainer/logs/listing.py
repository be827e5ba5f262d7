"""Runs on the disk: their state, their progress, the command that continues each, and differences of two."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from core_rl.config.secret import hidden
from core_rl.errors import ConfigError
from core_rl_trainer.logs.metrics_log import Row, read_steps
from core_rl_trainer.outputs.run_files import LOCK, METRICS, RECIPE, RESULT, STATUS, read_json

__all__ = [
    "RunSummary",
    "State",
    "differing_recipes",
    "differing_values",
    "find_runs",
    "newest_metrics",
    "read_rows",
    "read_run",
]

State = Literal["running", "complete", "stopped", "interrupted"]

HEADLINES = ("reward", "loss", "eval_reward", "eval_loss")
"""The metric that is shown of a run: the first of these that it has."""
EVALUATIONS = ("eval_reward", "eval_reward_greedy", "eval_accuracy", "eval_loss")
"""The metric of the evaluations that is shown: the first of these that the run has."""

NO_METRICS = ("step", "version")
NO_FIELDS = ("output_dir", "fresh")
"""Fields in which any two runs differ."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run as its directory shows it."""

    path: Path
    state: State
    """``running``: a process is at work on it. ``stopped``: it ended before its last step, for the ``reason``.
    ``interrupted``: its process was killed."""
    reason: str
    step: int
    """The last step with metrics."""
    steps: int
    metric: str | None
    """The name of the reward or the loss; None before the first row of metrics."""
    value: float | None
    """Newest value of the metric; None also where it is not finite."""
    evaluation: str | None
    """The name of the metric of the newest evaluation; None before the first."""
    evaluation_value: float | None
    started: str | None
    """When the run began, in UTC; None where a version without this field wrote the run."""
    updated: str | None
    """When the run last wrote its page: for a run that ended, its end."""
    command: str | None
    """The command that continues the run, or extends a complete run; None while it is running."""
    recipe: Mapping[str, Any]
    """The recipe with all defaults, as plain values."""


def find_runs(root: Path) -> Iterator[Path]:
    """The directories of all runs below ``root``, itself included, in alphabetical order.

    Raises `ConfigError` when there is no such directory.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such directory; name a directory of runs, as output_dir does")
    for path, directories, files in os.walk(root):
        directories.sort()
        if RECIPE in files and LOCK in files:
            directories.clear()
            yield Path(path)


def read_run(path: Path) -> RunSummary:
    """The run in the directory ``path``. Raises `ConfigError` when there is none, or when a file of it is damaged."""
    if not (path / RECIPE).is_file():
        raise ConfigError(f"{path} holds no run: it has no {RECIPE}; name the output_dir of a run")
    try:
        recipe = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
        status = read_json(path / STATUS)
        result = read_json(path / RESULT)
        steps = int(recipe["steps"])
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: a file of the run is damaged: {line}; restore it, or remove the directory"
        ) from error
    state = _state(path, status, bool(result))
    rows = read_rows(path)
    metric, value = _newest(rows, HEADLINES)
    evaluation, evaluation_value = _newest(rows, EVALUATIONS)
    return RunSummary(
        path=path,
        state=state,
        reason=status.get("problem", "") if state == "stopped" else "",
        step=int(max((row["step"] for row in rows), default=0)),
        steps=steps,
        metric=metric,
        value=value,
        evaluation=evaluation,
        evaluation_value=evaluation_value,
        started=status.get("started"),
        updated=status.get("updated"),
        command=None
        if state == "running"
        else _command(path, status, steps * 2 if state == "complete" else None),
        recipe=recipe,
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of metrics of the run in the directory ``path``."""
    return read_steps(path / METRICS)


def _state(path: Path, status: Mapping[str, Any], has_result: bool) -> State:
    if _is_locked(path / LOCK):
        return "running"
    if status.get("status") == "stopped":
        return "stopped"
    return "complete" if has_result else "interrupted"


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # a copy of a run
        return False
    return False


def _newest(rows: Sequence[Row], metrics: Sequence[str]) -> tuple[str | None, float | None]:
    """The first of ``metrics`` in ``rows``, and its newest value."""
    for metric in metrics:
        values = [row[metric] for row in rows if metric in row]
        if values:
            return metric, values[-1]
    return None, None


def _command(path: Path, status: Mapping[str, Any], steps: int | None) -> str:
    """The command that continues the run; relative paths of its recipe start at its working directory."""
    where = status.get("working_directory", str(Path.cwd()))
    elsewhere = where != str(Path.cwd())
    recipe = (path.resolve() if elsewhere else path) / RECIPE
    command = f"core-rl train {shlex.quote(str(recipe))}" + (f" steps={steps}" if steps else "")
    return f"cd {shlex.quote(where)} && {command}" if elsewhere else command


def differing_recipes(first: RunSummary, second: RunSummary) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes differ, each with both values."""
    return {
        field: (hidden(field.rpartition(".")[2], left), hidden(field.rpartition(".")[2], right))
        for field, (left, right) in differing_values(first.recipe, second.recipe).items()
        if field not in NO_FIELDS
    }


def differing_values(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes, as plain values, differ, each with both values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*old, *new}):
        left, right, field = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            differing |= differing_values(left, right, f"{field}.")
        elif left != right:
            differing[field] = left, right
    return differing


def newest_metrics(*runs: RunSummary) -> dict[str, list[float | None]]:
    """The newest value of each metric of ``runs``, for each run; None where a run lacks the metric."""
    newest = [{name: value for row in read_rows(run.path) for name, value in row.items()} for run in runs]
    names = dict.fromkeys(name for values in newest for name in values if name not in NO_METRICS)
    return {name: [values.get(name) for values in newest] for name in names}
