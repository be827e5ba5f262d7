"""What SFT, reward models and DPO have in common: one update on a fixed batch, and the same loss as an evaluation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

from core_rl.backend.loss import LossSpec
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike

__all__ = ["EvalEngineLike", "SupervisedInterface"]

ConfigT = TypeVar("ConfigT", bound=Config)


class EvalEngineLike(TrainEngineLike, Protocol):
    """An engine that can also compute a loss without gradients."""

    def eval_batch(
        self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec
    ) -> dict[str, float]: ...


class SupervisedInterface(ModelInterface[ConfigT]):
    """A model interface whose batches come from data alone."""

    @abstractmethod
    def loss(self) -> LossSpec:
        """The loss with these settings."""

    def train_step(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One update with the whole batch."""
        self.check(batch)
        return engine.train_batch(batch, self.loss(), mb_spec)

    def evaluate(
        self, engine: EvalEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """The loss and its metrics; no weight changes."""
        self.check(batch)
        return engine.eval_batch(batch, self.loss(), mb_spec)

    def check(self, batch: SequenceBatch) -> None:
        """Raise `BatchError` that names what the batch lacks."""
