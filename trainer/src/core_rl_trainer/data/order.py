"""Orders of the data of a run, pure functions of seed and position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from core_rl.seeds import derive_seed


class ShuffledOrder(Iterator[int]):
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


class MixedOrder(Iterator[int]):
    """Several orders in one, each with its share of the items: ``weights``, relative to each other.

    Every item comes from the order that is furthest behind its share, so that the shares are exact at any time, up to
    one item. Items are numbered order by order; ``sizes`` are the numbers of items.
    """

    def __init__(
        self, orders: Sequence[ShuffledOrder | MixedOrder], sizes: Sequence[int], weights: Sequence[float]
    ) -> None:
        self._orders = orders
        self._first = [0, *accumulate(sizes)]
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(orders)

    def __next__(self) -> int:
        due = sum(self._drawn) + 1
        behind = [share * due - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        number = behind.index(max(behind))
        self._drawn[number] += 1
        return self._first[number] + next(self._orders[number])

    def state_dict(self) -> dict[str, Any]:
        """The positions of all orders."""
        return {"drawn": list(self._drawn), "parts": [order.state_dict() for order in self._orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._drawn = [int(drawn) for drawn in state["drawn"]]
        for order, position in zip(self._orders, state["parts"], strict=True):
            order.load_state_dict(position)


Order = ShuffledOrder | MixedOrder
"""An endless order of the numbers of samples, whose position is JSON."""
