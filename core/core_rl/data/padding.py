"""Between packed batches and padded ``[B, L]`` tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError

__all__ = ["from_padded", "pad_tokens", "to_padded"]

Side = Literal["left", "right"]


def from_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    tokens: Mapping[str, Tensor] | None = None,
    sequences: Mapping[str, Tensor] | None = None,
    unit: Tensor | None = None,
) -> SequenceBatch:
    """Pack ``input_ids [B, L]`` where ``attention_mask [B, L]`` is 1; padding may stand on either side.

    ``tokens`` are ``[B, L, ...]``. Raises `BatchError` for wrong shapes and for a mask with a hole.
    """
    shape = input_ids.shape
    if input_ids.dim() != 2 or attention_mask.shape != shape:
        raise BatchError(
            f"input_ids {list(shape)} and attention_mask {list(attention_mask.shape)} must both be [B, L]"
        )
    for name, value in (tokens or {}).items():
        if value.shape[:2] != shape:
            raise BatchError(
                f"token field {name!r} must be [B={shape[0]}, L={shape[1]}, ...]; got {list(value.shape)}"
            )
    keep = attention_mask.bool()
    holes = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0].long() > 1
    if holes.any():
        raise BatchError(
            f"attention_mask of sequence {int(holes.nonzero()[0])} has a hole; pad on one side only"
        )
    lengths = keep.sum(1).to("cpu", torch.int32)
    return SequenceBatch(
        input_ids=input_ids[keep],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]),
        tokens={name: value[keep] for name, value in (tokens or {}).items()},
        sequences=dict(sequences or {}),
        unit=unit,
    )


def pad_tokens(values: Tensor, batch: SequenceBatch, *, side: Side = "right", fill: float = 0) -> Tensor:
    """A token field ``[T, ...]`` of ``batch`` as ``[B, L, ...]``, with ``fill`` in the padding."""
    length = batch.max_length
    out = values.new_full((batch.num_sequences, length, *values.shape[1:]), fill)
    for row, (piece, size) in enumerate(zip(values.split(batch.lengths), batch.lengths, strict=True)):
        start = length - size if side == "left" else 0
        out[row, start : start + size] = piece
    return out


def to_padded(batch: SequenceBatch, *, side: Side = "right", pad_id: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` (int64 ``[B, L]``) and all token fields ``[B, L, ...]``."""
    mask = pad_tokens(torch.ones_like(batch.input_ids), batch, side=side)
    padded = {
        "input_ids": pad_tokens(batch.input_ids, batch, side=side, fill=pad_id),
        "attention_mask": mask,
    }
    return padded | {name: pad_tokens(value, batch, side=side) for name, value in batch.tokens.items()}
