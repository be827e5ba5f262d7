"""Putting the results of a forward-only pass back in the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.errors import BatchError

__all__ = ["AggregateFn", "gather_collected"]

AggregateFn = Callable[[list[Tensor]], Any]


def gather_collected(
    batch: SequenceBatch,
    plan: Sequence[Sequence[int]],
    collected: Mapping[int, ModelOutput | Tensor],
    output_seqlens: Sequence[int] | None,
    aggregate_fn: AggregateFn | None,
) -> Any:
    """Gather what was ``collected`` for each micro-batch of ``plan``, in the order of ``batch``."""
    numbers = [number for number, part in enumerate(plan) if part]
    order = [index for number in numbers for index in plan[number]]
    outputs = [item for number in numbers if isinstance(item := collected[number], ModelOutput)]
    if len(outputs) == len(numbers):
        if not outputs:
            return ModelOutput()
        return ModelOutput.concat(outputs).reorder(batch.token_index(order), torch.tensor(order))
    rows: dict[int, Tensor] = {}
    for number in numbers:
        rows |= _rows(collected[number], plan[number], batch, output_seqlens)
    return (aggregate_fn or torch.cat)([rows[index] for index in range(batch.num_sequences)])


def _rows(
    value: ModelOutput | Tensor,
    part: Sequence[int],
    batch: SequenceBatch,
    output_seqlens: Sequence[int] | None,
) -> dict[int, Tensor]:
    """One tensor for each sequence of a micro-batch."""
    if not isinstance(value, Tensor):
        raise BatchError(f"post_hook must return a tensor; it returned a {type(value).__name__}")
    value = value.detach().to("cpu")
    if output_seqlens is not None:
        sizes = [output_seqlens[index] for index in part]
    else:
        sizes = [batch.lengths[index] for index in part]
        if len(value) != sum(sizes):
            sizes = [1] * len(part)
    if len(value) != sum(sizes):
        raise BatchError(
            f"post_hook returned {len(value)} rows for {len(part)} sequences with {sum(sizes)} expected rows; "
            "return one row for each token or sequence, or pass output_seqlens"
        )
    return dict(zip(part, value.split(sizes), strict=True))
