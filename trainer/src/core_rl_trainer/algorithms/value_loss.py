"""The loss of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.masked import masked_fill, masked_sum
from core_rl.data.outputs import ModelOutput
from core_rl_trainer.algorithms.aggregation import Aggregation, aggregate, weight_fn
from core_rl_trainer.algorithms.fields import RETURNS, VALUES

__all__ = ["ValueLoss", "clipped_value_error"]


def clipped_value_error(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error to ``returns``, and where clipping held it; both ``[T]``.

    With ``clip`` it is the larger of the errors of the value and of the value held within ``clip`` of the old
    one (PPO's code, described in arXiv:2005.12729, section 2): a value that has moved far gains nothing.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    held = (old + (values - old).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(plain, held), held > plain


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """`clipped_value_error`; the batch holds ``values`` before the updates and ``returns``, both ``[T]``."""

    clip: float | None = 0.2
    aggregation: Aggregation = "token_mean"

    def spec(self) -> LossSpec:
        """The loss as a train engine with a value head takes it."""
        return LossSpec(fn=self, weight_fn=weight_fn(self.aggregation), outputs=("values",))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum; metrics are means over trained tokens."""
        mask, count = batch.loss_mask, batch.loss_mask.sum()
        values, returns = masked_fill(output["values"], mask), masked_fill(batch[RETURNS], mask)
        errors, held = clipped_value_error(values, masked_fill(batch[VALUES], mask), returns, self.clip)
        means = {
            "value_loss": errors,
            "value": values,
            "return": returns,
            "value_clip_fraction": held.float(),
        }
        metrics = {name: Metric.mean(masked_sum(value, mask), count) for name, value in means.items()}
        return aggregate(errors, batch, self.aggregation), metrics
