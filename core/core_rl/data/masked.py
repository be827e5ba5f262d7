"""Reductions that select by a mask and never multiply by it: ``0 * NaN`` is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_fill", "masked_mean", "masked_sum", "segment_sum"]


def masked_fill(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is true and 0 elsewhere; no gradient flows to the rest. Same shape."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The scalar sum of ``values [T]`` where ``mask [T]`` is true; 0 when it is true nowhere."""
    return masked_fill(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The scalar mean of ``values [T]`` where ``mask [T]`` is true; 0 when it is true nowhere.

    For metrics inside one batch. A loss returns sums instead: means of means depend on the cut.
    """
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Per-sequence sums ``[B, ...]`` of token values ``[T, ...]``, in the dtype of ``values``."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(device=values.device, dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros((len(lengths), *values.shape[1:])).index_add(0, owner, values)
