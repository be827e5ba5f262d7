"""Events of a run, and callbacks, which get them: for notebooks, sweeps and early stopping.

A callback is called with each event, in the process and the thread of `train`, between two steps:

    def solved(event: Event) -> None:
        if isinstance(event, EvaluationEnd) and event.metrics["eval_reward"] > 0.9:
            raise StopRun("the reward is above 0.9")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from core_rl_trainer.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """The fields of every event."""

    recipe: Recipe
    """The recipe of the run; its ``directory`` holds all files of the run."""
    step: int
    """The number of training steps that are done."""


@dataclass(frozen=True, kw_only=True)
class StepEnd(RunEvent):
    """A training step is done, and its row is in ``metrics.jsonl``."""

    metrics: Mapping[str, float]
    """The metrics of the step, such as ``reward``, ``loss`` and ``grad_norm``."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEnd(RunEvent):
    """An evaluation is done. At step 0 it is that before the training."""

    metrics: Mapping[str, float]
    """The metrics of the evaluation, such as ``eval_reward`` and ``eval_loss``."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(RunEvent):
    """A run checkpoint is complete on the disk: that of an earlier step where it was written in the background."""

    path: Path
    """Directory of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunEnd(RunEvent):
    """The run has come to its end, or a callback has stopped it; all files are written."""

    result: Mapping[str, Any]
    """The result of `train`; ``stopped`` is the reason of a callback, or None."""


@dataclass(frozen=True, kw_only=True)
class RunFailed(RunEvent):
    """An error ends the run, or Ctrl-C, a signal or ``stop_on``. `train` raises it after this event."""

    error: BaseException
    """The error."""


Event: TypeAlias = StepEnd | EvaluationEnd | CheckpointSaved | RunEnd | RunFailed
"""Any event of a run."""


class Callback(Protocol):
    """A function, or an object with ``__call__``, that gets every event. An error that it raises ends the run."""

    def __call__(self, event: Event, /) -> None: ...


class StopRun(Exception):
    """Raised by a callback to stop the run after this step, with a checkpoint of it; its text is the reason."""
