"""Learning from data alone, and supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_sum
from core_rl_trainer.algorithms.aggregation import Aggregation, aggregate, weight_fn
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike

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
        """Raise `BatchError` that names fields that the batch lacks."""

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``logprobs [T]`` of the engine's weights; the caller stores the reference's."""
        return batch.with_tokens(logprobs=engine.forward(batch, mb_spec)["logprobs"])


class SFTConfig(Config):
    """Settings of supervised fine-tuning, and its loss: minus the log-probs of the trained tokens."""

    aggregation: Aggregation = "token_mean"
    """``token_mean``, or ``sequence_mean``: each sequence counts the same, however long."""

    def spec(self) -> LossSpec:
        """The loss as a train engine takes it."""
        return LossSpec(fn=self, weight_fn=weight_fn(self.aggregation))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum; metric ``nll``, the mean over tokens under either aggregation."""
        losses, mask = -output["logprobs"], batch.loss_mask
        nll = Metric.mean(masked_sum(losses, mask), mask.sum())
        return aggregate(losses, batch, self.aggregation), {"nll": nll}


class SFTInterface(SupervisedInterface[SFTConfig]):
    """One optimizer step on the batch's trained tokens."""

    config_class = SFTConfig
    trains_on = "demonstrations"

    def loss(self) -> LossSpec:
        return self.config.spec()
