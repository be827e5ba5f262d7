"""`Learner`: the operations of a training step, on rollouts or on data."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.data.batch import SequenceBatch
from core_rl.launch.group import EngineGroup
from core_rl_trainer.logs.samples import Evaluation

__all__ = ["Learner", "Phases"]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Names of the phases of a run; the metric of a step's phase is ``time_NAME_s``."""

    start: str
    """Of `Learner.start`, for the progress."""
    batch: str
    score: str | None = None
    """None where nothing is scored."""
    sync: str | None = None
    """None where no other engine gets the weights."""


class Learner(Protocol):
    """Engines, algorithm and data of a run, for `core_rl_trainer.run.loop.RunLoop`."""

    @property
    def phases(self) -> Phases:
        """Names of the phases."""

    def start(self) -> None:
        """Prepare the first step."""

    def batch(self, step: int) -> SequenceBatch:
        """The sequences of ``step``."""

    def training(self) -> AbstractContextManager[None]:
        """Inside the context the train engines have the devices."""

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        """``batch`` with the fields that the algorithm wants, and metrics."""

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """The updates of ``step``; their metrics."""

    def sync(self, version: int) -> None:
        """Send the weights of ``version`` to the rollout engine."""

    def evaluate(self) -> Evaluation:
        """Evaluate on the evaluation data."""

    def save_model(self, path: Path) -> None:
        """Write the model in Hugging Face format."""

    def save_adapter(self, path: Path) -> None:
        """Write the trained adapter in the layout of ``peft``."""

    def trained(self) -> dict[str, EngineGroup]:
        """The groups whose state a checkpoint holds, by role."""

    def state_dict(self) -> dict[str, Any]:
        """The rest of a run checkpoint, as JSON."""

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``."""
