"""Aggregation of per-token losses: the sum and the weight of the loss contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor

from core_rl.backend.loss import WeightFn, count_sequences, count_tokens
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import masked_fill, masked_sum, segment_sum


class FixedLength(Config):
    """Dr. GRPO (arXiv:2503.20783): the sum over tokens, divided by sequences times a constant length.

    Unlike ``sequence_mean``, it does not favour short right completions and long wrong ones.
    """

    fixed_length: int = Field(ge=1)
    """The length that stands for all, such as the most tokens of a completion."""


Aggregation = Literal["token_mean", "sequence_mean"] | FixedLength
"""``token_mean``: each trained token of the global batch counts the same (DAPO, arXiv:2503.14476).
``sequence_mean``: each sequence does, by the mean of its trained tokens (GRPO, arXiv:2402.03300).
`FixedLength`: each token does, whatever the lengths in the batch."""


def aggregate(values: Tensor, batch: SequenceBatch, how: Aggregation) -> Tensor:
    """The scalar **sum** of the counted ``values [T]``, in the dtype of ``values``; masked tokens count nothing.

    Divided by the matching `weight_fn` summed over the global batch, it is the mean of that name.
    """
    if how == "sequence_mean":
        return sequence_mean(values, batch).sum()
    return masked_sum(values, batch.loss_mask)


def sequence_mean(values: Tensor, batch: SequenceBatch) -> Tensor:
    """The mean of the trained tokens of each sequence: ``[T]`` to ``[B]``; 0 for a sequence without any."""
    mask = batch.loss_mask
    counts = segment_sum(mask.to(values.dtype), batch.cu_seqlens)
    return segment_sum(masked_fill(values, mask), batch.cu_seqlens) / counts.clamp(min=1)


def weight_fn(how: Aggregation) -> WeightFn:
    """The divisor of `aggregate`: trained tokens, or sequences with a trained token, perhaps times a length."""
    if isinstance(how, FixedLength):
        return _CountFixedLength(length=how.fixed_length)
    return count_tokens if how == "token_mean" else count_sequences


@dataclass(frozen=True, kw_only=True)
class _CountFixedLength:
    length: int

    def __call__(self, batch: SequenceBatch) -> float:
        return self.length * count_sequences(batch)
