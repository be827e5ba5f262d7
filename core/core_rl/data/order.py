"""Sequences in another order: packed fields, and `PrefixOrder`, in which neighbours share the most tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
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


@dataclass(frozen=True)
class PrefixOrder:
    """Sequences in an order in which neighbours share the most."""

    lengths: NDArray[np.int64]
    """Tokens of each sequence."""
    places: NDArray[np.int64]
    """The place of each sequence in the order; a prefix of a sequence comes before it."""
    common: NDArray[np.int64]
    """At each place, the tokens in common with the sequence before; 0 at the first."""

    @staticmethod
    def of(keys: Sequence[NDArray[np.int64]]) -> PrefixOrder:
        """The order of sequences with these keys, ``[L, n]`` each; equal keys are computed once."""
        texts = [key.tobytes() for key in keys]
        order = sorted(range(len(keys)), key=texts.__getitem__)
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        common = _common([keys[index] for index in order])
        return PrefixOrder(np.array([len(key) for key in keys]), places, common)

    def shared(self, first: int, second: int) -> int:
        """Tokens that two sequences have in common: the fewest between any neighbours from one to the other."""
        low, high = sorted((self.places[first], self.places[second]))
        return int(self.common[low + 1 : high + 1].min())

    def computed(self, sequences: Sequence[int]) -> int:
        """Tokens of ``sequences`` with each shared prefix counted once."""
        if not sequences:
            return 0
        places = np.sort(self.places[list(sequences)])
        between = self.common[: places[-1] + 1]
        shared = np.minimum.reduceat(between, places[:-1] + 1).sum() if len(places) > 1 else 0
        return int(self.lengths[list(sequences)].sum() - shared)


def _common(keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Equal rows at the beginning of each of ``keys`` and its predecessor; 0 at the first."""
    pairs = [(first[: len(second)], second[: len(first)]) for first, second in pairwise(keys)]
    if not pairs:
        return np.zeros(1, dtype=np.int64)
    lengths = np.array([len(first) for first, _ in pairs])
    starts = lengths.cumsum() - lengths
    differs = np.concatenate([first for first, _ in pairs]) != np.concatenate([second for _, second in pairs])
    places = np.append(differs.any(axis=1).nonzero(), len(differs))
    following = places[np.searchsorted(places, starts)]
    return np.append(0, np.minimum(following - starts, lengths))
