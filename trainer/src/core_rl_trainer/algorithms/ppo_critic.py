"""The critic of PPO (arXiv:1707.06347): an engine with a value head that learns to predict returns."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_fill, masked_sum
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms.aggregation import Aggregation, aggregate, weight_fn
from core_rl_trainer.algorithms.fields import BOOTSTRAP, RETURNS, VALUES, require_fields
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike
from core_rl_trainer.algorithms.updates import UpdatesConfig, merge_updates, peers, run_updates


def clipped_value_error(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error to ``returns``, and where clipping changed it; both ``[T]``.

    With ``clip`` it is the larger of two errors: that of the value, and that of the value clamped to within ``clip``
    of the old one (PPO's code, described in arXiv:2005.12729, section 2). A value that has moved far gains nothing.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clamped = (old + (values - old).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(plain, clamped), clamped > plain


class PPOCriticConfig(UpdatesConfig):
    """Settings of the critic, and its loss `clipped_value_error` of ``returns`` and the earlier ``values``, ``[T]``."""

    value_clip: float | None = Field(default=0.2, gt=0.0)
    """A value that moves further than this from that before the updates gains nothing; null turns it off."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``, or ``sequence_mean``: each sequence counts the same, however long."""

    def spec(self) -> LossSpec:
        """The loss as a train engine with a value head takes it."""
        return LossSpec(fn=self, weight_fn=weight_fn(self.aggregation), outputs=("values",))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum; metrics are means over trained tokens."""
        mask, count = batch.loss_mask, batch.loss_mask.sum()
        values, returns = masked_fill(output["values"], mask), masked_fill(batch[RETURNS], mask)
        errors, clipped = clipped_value_error(
            values, masked_fill(batch[VALUES], mask), returns, self.value_clip
        )
        means = {
            "value_loss": errors,
            "value": values,
            "return": returns,
            "value_clip_fraction": clipped.float(),
        }
        metrics = {name: Metric.mean(masked_sum(value, mask), count) for name, value in means.items()}
        return aggregate(errors, batch, self.aggregation), metrics


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
        comm = peers(engine)
        if not comm.sum([float(batch.num_sequences)])[0]:
            return {"updates": 0.0, "update_successful": 0.0}
        updates = run_updates(engine, batch, self.config.spec(), mb_spec, self.config)
        return merge_updates(updates) | {"explained_variance": explained_variance(batch, comm)}

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``values [T]``, of the state before each token, and ``bootstrap [B]``, after the last."""
        output = engine.forward(batch, mb_spec, ("values",))
        scored = batch.with_tokens(**{VALUES: output["values"]})
        return scored.with_sequences(**{BOOTSTRAP: output["bootstrap"]})


def explained_variance(batch: SequenceBatch, comm: Comm) -> float:
    """``1 - var(returns - values) / var(returns)`` over the trained tokens of all ranks; 0 for constant returns."""
    mask = batch.loss_mask
    returns = batch[RETURNS][mask].double()
    errors = returns - batch[VALUES][mask].double()
    local_sums = [returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    count, first, second, error, square = comm.sum(
        [float(len(returns)), *(float(value) for value in local_sums)]
    )
    if not count:
        return 0.0
    variance = second / count - (first / count) ** 2
    residual = square / count - (error / count) ** 2
    return 1 - residual / variance if variance > 1e-12 else 0.0
