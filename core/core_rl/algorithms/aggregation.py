"""From per-token losses to the sum and the weight of the loss contract."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.masked import masked_fill, masked_sum, segment_sum
from core_rl.engines.loss import WeightFn, count_sequences, count_tokens

__all__ = ["Aggregation", "aggregate", "weight_fn"]

Aggregation = Literal["token_mean", "sequence_mean"]
"""``token_mean``: each trained token of the global batch counts the same (DAPO, arXiv:2503.14476).
``sequence_mean``: each sequence does, by the mean of its trained tokens (GRPO, arXiv:2402.03300)."""


def aggregate(values: Tensor, batch: SequenceBatch, how: Aggregation) -> Tensor:
    """The scalar **sum** of what ``values [T]`` count, in the dtype of ``values``; masked tokens count nothing.

    Divided by the matching `weight_fn` summed over the global batch, it is the mean of that name.
    """
    mask = batch.loss_mask
    if how == "token_mean":
        return masked_sum(values, mask)
    counts = segment_sum(mask.to(values.dtype), batch.cu_seqlens)
    return (segment_sum(masked_fill(values, mask), batch.cu_seqlens) / counts.clamp(min=1)).sum()


def weight_fn(how: Aggregation) -> WeightFn:
    """How much `aggregate` counts: trained tokens, or sequences with a trained token."""
    return count_tokens if how == "token_mean" else count_sequences
