"""Cutting a batch into micro-batches that fit one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from core_rl.data.batch import SequenceBatch
from core_rl.data.partition import balanced, best_fit, weighted_units
from core_rl.errors import BatchError, raise_all

__all__ = ["MicroBatchSpec", "count_micro_batches", "plan_micro_batches"]


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """A token budget, or a number of micro-batches; exactly one of the two."""

    max_tokens: int | None = None
    """At most this many tokens in each micro-batch, in as few balanced micro-batches as fit."""
    count: int | None = None
    """This many micro-batches of nearly equal numbers of tokens."""

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.count is None):
            raise BatchError("MicroBatchSpec needs exactly one of max_tokens and count")
        value = self.max_tokens if self.count is None else self.count
        if value is None or value < 1:
            raise BatchError(f"MicroBatchSpec must be positive; got {value}")


def count_micro_batches(batch: SequenceBatch, spec: MicroBatchSpec) -> int:
    """The number of micro-batches that this rank needs, at least one.

    Raises one `BatchError` that names each sequence or unit longer than the budget.
    """
    if spec.max_tokens is None:
        return spec.count or 1
    groups, weights = weighted_units(batch)
    too_long = [
        f"{f'sequence {group[0]}' if len(group) == 1 else f'the unit of sequences {group}'} has {weight} tokens, "
        f"and max_tokens is {spec.max_tokens}; raise max_tokens or cut it"
        for group, weight in zip(groups, weights, strict=True)
        if weight > spec.max_tokens
    ]
    raise_all(BatchError, "micro-batches", too_long)
    return max(1, len(best_fit(weights, spec.max_tokens)))


def plan_micro_batches(batch: SequenceBatch, spec: MicroBatchSpec, count: int) -> list[list[int]]:
    """The sequences of each of ``count`` micro-batches; each sequence once, and units stay whole.

    ``count`` is the largest `count_micro_batches` of the data-parallel ranks, so that all run
    equally many; an empty list stands for a dummy.
    """
    groups, weights = weighted_units(batch)
    parts = balanced(weights, count)
    budget = spec.max_tokens
    if budget is not None and any(sum(weights[i] for i in part) > budget for part in parts):
        # LPT balances best but does not know the budget; best fit keeps it, in no more bins.
        packed = best_fit(weights, budget)
        parts = packed + [[] for _ in range(count - len(packed))]
    return [[index for item in part for index in groups[item]] for part in parts]
