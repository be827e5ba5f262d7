"""Sequences of packed fields in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE_FROM = 512
"""Tokens of a mean sequence from which on a copy of whole sequences costs less than an index of their tokens."""


def bounds_of(lengths: Tensor) -> Tensor:
    """``cu_seqlens [B + 1]``, int32, of sequences of these ``lengths [B]``."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def token_index(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """Positions of the sequences ``rows [N]`` in the token dimension, int64, on the CPU."""
    bounds = bounds_of(cu_seqlens[rows + 1] - cu_seqlens[rows])
    shifts = cu_seqlens[rows].long() - bounds[:-1]
    return torch.arange(int(bounds[-1])) + torch.repeat_interleave(shifts, bounds.diff())


def gather_sequences(fields: Sequence[Tensor], cu_seqlens: Tensor, rows: Tensor) -> list[Tensor]:
    """The sequences ``rows [N]`` of each of ``fields``, ``[T, ...]``, end to end."""
    count = len(cu_seqlens) - 1
    # A split has a view for each sequence, the others included.
    most = len(rows) > 0 and 2 * len(rows) >= count
    if most and cu_seqlens[-1] >= WHOLE_FROM * count:
        lengths, order = cu_seqlens.diff().tolist(), rows.tolist()
        sequences = [value.split(lengths) for value in fields]
        return [torch.cat([of_field[row] for row in order]) for of_field in sequences]
    positions = token_index(cu_seqlens, rows)
    return [value.index_select(0, positions.to(value.device)) for value in fields]
