"""The critic of PPO (arXiv:1707.06347): an engine with a value head that learns to predict returns."""

from __future__ import annotations

from pydantic import Field

from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms.aggregation import Aggregation
from core_rl_trainer.algorithms.fields import BOOTSTRAP, RETURNS, VALUES
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike
from core_rl_trainer.algorithms.updates import (
    UpdatesConfig,
    merge_updates,
    peers,
    require_fields,
    run_updates,
)
from core_rl_trainer.algorithms.value_loss import ValueLoss

__all__ = ["PPOCriticConfig", "PPOCriticInterface"]


class PPOCriticConfig(UpdatesConfig):
    """Settings of the critic."""

    value_clip: float | None = Field(default=0.2, gt=0.0)
    """A value that moves further than this from that before the updates gains nothing; null turns it off."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``, or ``sequence_mean``: each sequence counts the same, however long."""


class PPOCriticInterface(ModelInterface[PPOCriticConfig]):
    """`inference` before the actor prepares a batch; `train_step` on the prepared batch."""

    config_class = PPOCriticConfig

    def train_step(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """``epochs * minibatches`` updates on ``returns [T]``, which the actor's ``prepare`` adds.

        ``explained_variance`` is that of the values before the updates: 1 where they are the returns, 0
        where a constant would do as well.
        """
        require_fields("the PPO critic", batch, {LOSS_MASK, VALUES, RETURNS})
        world = peers(engine)
        if not world.sum([float(batch.num_sequences)])[0]:
            return {"updates": 0.0, "update_successful": 0.0}
        loss = ValueLoss(clip=self.config.value_clip, aggregation=self.config.aggregation).spec()
        updates = run_updates(engine, batch, loss, mb_spec, self.config)
        return merge_updates(updates) | {"explained_variance": explained_variance(batch, world)}

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``values [T]``, of the state before each token, and ``bootstrap [B]``, after the last."""
        output = engine.forward(batch, mb_spec, ("values",))
        scored = batch.with_tokens(**{VALUES: output["values"]})
        return scored.with_sequences(**{BOOTSTRAP: output["bootstrap"]})


def explained_variance(batch: SequenceBatch, world: Comm) -> float:
    """``1 - var(returns - values) / var(returns)`` over the trained tokens of all ranks; 0 for constant returns."""
    mask = batch.loss_mask
    returns = batch[RETURNS][mask].double()
    errors = returns - batch[VALUES][mask].double()
    own = [returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    count, first, second, error, square = world.sum([float(len(returns)), *(float(value) for value in own)])
    if not count:
        return 0.0
    variance = second / count - (first / count) ** 2
    residual = square / count - (error / count) ** 2
    return 1 - residual / variance if variance > 1e-12 else 0.0
