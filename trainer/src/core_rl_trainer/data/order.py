"""Endless orders of the examples of a run: pure functions of seed and position, so that a resumed run has the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from core_rl.seeds import derive_seed

__all__ = ["FilteredOrder", "MixedOrder", "Order", "ShuffledOrder"]


class Order(Iterator[int], ABC):
    """Numbers of examples, without an end."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""


class ShuffledOrder(Order):
    """An endless order of ``size`` items, shuffled anew in each pass."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __next__(self) -> int:
        epoch, offset = divmod(self._position, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            self._order, self._epoch = torch.randperm(self._size, generator=generator), epoch
        self._position += 1
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """The number of items drawn so far."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after as many items."""
        self._position = int(state["position"])


class MixedOrder(Order):
    """Several orders in one, each with its share of the items: ``weights``, relative to each other.

    Every item comes from the order that is furthest behind its share, so that the shares are exact at any time, up to
    one item. The items of order ``n`` are numbered after those of all before it, which have ``sizes``.
    """

    def __init__(self, parts: Sequence[Order], sizes: Sequence[int], weights: Sequence[float]) -> None:
        self._parts = parts
        self._first = [0, *accumulate(sizes)]
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(parts)

    def __next__(self) -> int:
        due = sum(self._drawn) + 1
        behind = [share * due - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        number = behind.index(max(behind))
        self._drawn[number] += 1
        return self._first[number] + next(self._parts[number])

    def state_dict(self) -> dict[str, Any]:
        """The positions of all parts."""
        return {"drawn": list(self._drawn), "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._drawn = [int(drawn) for drawn in state["drawn"]]
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own)


class FilteredOrder(Order):
    """The items of ``order`` that ``accepts`` takes."""

    def __init__(self, order: Order, accepts: Callable[[int], bool]) -> None:
        self._order = order
        self._accepts = accepts

    def __next__(self) -> int:
        return next(number for number in self._order if self._accepts(number))

    def state_dict(self) -> dict[str, Any]:
        """The position in the whole order."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._order.load_state_dict(state)
