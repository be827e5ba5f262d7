"""Balanced partitions of items with a weight: the one algorithm behind shards and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from core_rl.data.batch import SequenceBatch

__all__ = ["balanced", "first_fit", "units"]


def units(batch: SequenceBatch) -> list[list[int]]:
    """The sequences of each unit, in order of first appearance; a sequence alone without ``unit``."""
    if batch.unit is None:
        return [[index] for index in range(batch.num_sequences)]
    groups: dict[int, list[int]] = {}
    for index, number in enumerate(torch.as_tensor(batch.unit).tolist()):
        groups.setdefault(number, []).append(index)
    return list(groups.values())


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into ``parts`` lists of nearly equal weight (largest first onto the lightest).

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969). Deterministic; items keep their order inside
    a part; some parts are empty when there are fewer items than parts.
    """
    heap = [(0, 0, part) for part in range(parts)]
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        load, count, part = heapq.heappop(heap)
        result[part].append(item)
        heapq.heappush(heap, (load + weights[item], count + 1, part))
    return [sorted(part) for part in result]


def first_fit(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into bins of at most ``budget``, largest first into the first bin that has room.

    First-fit decreasing uses at most 11/9 of the optimal number of bins, plus one. No item may be
    heavier than the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        target = next((b for b, free in enumerate(room) if free >= weights[item]), None)
        if target is None:
            bins.append([])
            room.append(budget)
            target = len(bins) - 1
        bins[target].append(item)
        room[target] -= weights[item]
    return [sorted(items) for items in bins]
