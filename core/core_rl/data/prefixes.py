"""Prefixes that sequences share: cuts of a batch that share much, and trees with each prefix once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.order import PrefixOrder

LEAST_SAVED = 0.05
"""The part of the tokens that sharing has to save: gathered keys and gathered outputs cost a little."""


@dataclass(frozen=True)
class SharedUnits:
    """Units of a batch in an order in which neighbours share prefixes, for cuts into runs of neighbours."""

    groups: Sequence[Sequence[int]]
    """The sequences of each unit."""
    weights: Sequence[int]
    """The tokens of each unit, shared ones counted once."""
    saved: Sequence[int]
    """Tokens that the unit shares with its predecessor."""
    order: PrefixOrder

    @staticmethod
    def of(batch: SequenceBatch, units: Sequence[Sequence[int]]) -> SharedUnits | None:
        """Order ``units``, lists of sequences; None where sharing saves too little to change the cut for it."""
        order = batch.prefix_order
        rank = order.places.tolist()
        groups = sorted(
            (sorted(unit, key=rank.__getitem__) for unit in units), key=lambda unit: rank[unit[0]]
        )
        flat = [index for group in groups for index in group]
        shared = [0, *(order.shared(first, second) for first, second in pairwise(flat))]
        if sum(shared) < LEAST_SAVED * batch.num_tokens:
            return None
        lengths, weights, saved, place = batch.lengths, [], [], 0
        for group in groups:
            inside = shared[place + 1 : place + len(group)]
            weights.append(sum(lengths[index] for index in group) - sum(inside))
            saved.append(shared[place])
            place += len(group)
        return SharedUnits(groups, weights, saved, order)

    def sequences(self, run: range) -> list[int]:
        """The sequences of a run of units, ascending."""
        return sorted(index for item in run for index in self.groups[item])

    def weight(self, run: range) -> int:
        """The tokens of a run of units."""
        return sum(self.weights[item] for item in run) - sum(self.saved[item] for item in run[1:])

    def cost(self, plan: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Tokens that the slowest of the ranks of ``plan`` computes, and all of them together."""
        computed = [self.order.computed(sequences) for sequences in plan]
        return max(computed), sum(computed)

    def within(self, budget: int) -> list[range]:
        """Runs of at most ``budget`` tokens that compute the fewest tokens in all; among those, the fewest runs.

        No unit may be heavier than the budget.
        """
        # A run from `start` to `end` computes `ends[end] - ends[start] + saved[start]` tokens.
        ends = [
            0,
            *accumulate(weight - saved for weight, saved in zip(self.weights, self.saved, strict=True)),
        ]
        best: list[tuple[int, int, int]] = [(0, 0, 0)]
        """Tokens, runs, and the start of the last run, for the first n units."""
        options: deque[tuple[int, int, int]] = deque()
        """Starts of the last run, the best one first; each later one is worse, and serves heavier ends."""
        for end in range(1, len(self.groups) + 1):
            start = end - 1
            tokens, runs, _ = best[start]
            option = (tokens - ends[start] + self.saved[start], runs + 1, start)
            while options and options[-1] > option:
                options.pop()
            options.append(option)
            while ends[end] - ends[options[0][2]] + self.saved[options[0][2]] > budget:
                options.popleft()
            tokens, runs, start = options[0]
            best.append((tokens + ends[end], runs, start))
        cut: list[range] = []
        end = len(self.groups)
        while end:
            cut.append(range(best[end][2], end))
            end = cut[-1].start
        return cut[::-1]

    def least_shared(self, count: int) -> Iterator[list[range]]:
        """Cuts where neighbours share the fewest tokens: into at least ``count`` runs, then into twice as many."""
        levels = sorted(self.saved[1:])
        while 2 <= count <= len(self.groups):
            starts = [item for item, saved in enumerate(self.saved) if not item or saved <= levels[count - 2]]
            yield [range(first, last) for first, last in pairwise([*starts, len(self.groups)])]
            count = 2 * len(starts)

    def evenly(self, count: int) -> list[range]:
        """At most ``count`` runs, of which the heaviest is as light as it can be."""
        lowest, highest = max(self.weights), sum(self.weights)
        while lowest < highest:
            middle = (lowest + highest) // 2
            if len(self._filled(middle)) <= count:
                highest = middle
            else:
                lowest = middle + 1
        return self._filled(highest)

    def _filled(self, budget: int) -> list[range]:
        """Runs that are each filled as far as ``budget`` allows: the fewest."""
        starts, load = [0], self.weights[0]
        for item in range(1, len(self.groups)):
            load += self.weights[item] - self.saved[item]
            if load > budget:
                starts.append(item)
                load = self.weights[item]
        return [range(first, last) for first, last in pairwise([*starts, len(self.groups)])]


@dataclass(frozen=True)
class PrefixTree:
    """The tokens of a batch with each shared prefix once: rows in stretches, which follow one another on paths."""

    bounds: tuple[int, ...]
    """Stretch ``s`` has the rows ``bounds[s]:bounds[s + 1]``."""
    paths: tuple[tuple[int, ...], ...]
    """For each stretch, the stretches from the beginning of its sequences to itself."""
    kept: Tensor
    """A position in the batch of each row, int64 ``[U]``, on the CPU."""
    rows: Tensor
    """The row of each token of the batch, int64 ``[T]``, on the CPU."""

    @staticmethod
    def of(batch: SequenceBatch) -> PrefixTree | None:
        """The tree of all sequences of ``batch``; None where it would save too few tokens."""
        order, shared = np.argsort(batch.prefix_order.places), batch.prefix_order.common
        if shared.sum() < max(1, LEAST_SAVED * batch.num_tokens):
            return None
        starts = batch.cu_seqlens.numpy()[order].astype(np.int64)
        fresh = batch.prefix_order.lengths[order] - shared
        firsts, count = fresh.cumsum() - fresh, int(fresh.sum())
        kept = np.repeat(starts + shared - firsts, fresh) + np.arange(count)
        rows = np.empty(batch.num_tokens, dtype=np.int64)
        rows[kept] = np.arange(count)
        parents: dict[int, int] = {}
        """The row before each first row of a stretch; -1 before the first token of a sequence."""
        previous = 0
        columns = (starts.tolist(), shared.tolist(), firsts.tolist(), fresh.tolist())
        for start, common, first, new in zip(*columns, strict=True):
            rows[start : start + common] = rows[previous : previous + common]
            before = int(rows[start + common - 1]) if common else -1
            if new:
                parents[first] = before
            if common and before + 1 < first:  # another sequence goes on where this one leaves it
                parents.setdefault(before + 1, before)
            previous = start
        bounds = (*sorted(parents), count)
        ending = {last: stretch for stretch, last in enumerate(bounds[1:])}
        paths: list[tuple[int, ...]] = []
        for stretch, first in enumerate(bounds[:-1]):
            before = parents[first]  # ends a stretch with a smaller number
            paths.append((*(paths[ending[before + 1]] if before >= 0 else ()), stretch))
        return PrefixTree(bounds, tuple(paths), torch.from_numpy(kept), torch.from_numpy(rows))
