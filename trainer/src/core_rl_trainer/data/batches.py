"""Batches of samples in the data order of a run, a pure function of seed and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.seeds import derive_seed
from core_rl_trainer.algorithms.fields import CHOSEN
from core_rl_trainer.data.kinds import Sample

if TYPE_CHECKING:
    from core_rl_trainer.data.datasets import SampleDataset

__all__ = [
    "NUMBER",
    "MakeBatch",
    "MixedOrder",
    "NumberedBatches",
    "Order",
    "ShuffledOrder",
    "demonstration_batch",
    "preference_batch",
]

MakeBatch = Callable[[Sequence[Sample]], SequenceBatch]

NUMBER = "_number"
"""The field of a sample that holds its position in the data order of the run."""


class ShuffledOrder(Iterator[int]):
    """An endless order of ``size`` items, shuffled anew in each pass, without the items that ``accepts`` refuses."""

    def __init__(self, size: int, seed: int, accepts: Callable[[int], bool] = lambda _: True) -> None:
        self._size = size
        self._seed = seed
        self._accepts = accepts
        self._position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __next__(self) -> int:
        while not self._accepts(item := self._next_item()):
            pass
        return item

    def _next_item(self) -> int:
        epoch, offset = divmod(self._position, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            self._order, self._epoch = torch.randperm(self._size, generator=generator), epoch
        self._position += 1
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """The number of items drawn so far, with refused ones."""
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


class NumberedBatches(Iterator[list[Sample]]):
    """Batches of ``batch_size`` samples, each with its position in the data order; ``limit`` samples at most.

    A pass over the data may end in the middle of a batch; the next one begins there.
    """

    def __init__(self, dataset: SampleDataset, batch_size: int, seed: int, limit: int | None = None) -> None:
        self._dataset = dataset
        self._order = dataset.order(seed)
        self._batch_size = batch_size
        self._limit = limit
        self._drawn = 0

    def __next__(self) -> list[Sample]:
        if self._limit is not None and self._drawn >= self._limit:
            raise StopIteration
        # A streamed dataset keeps the samples that its order accepts until they are fetched.
        indices = [next(self._order) for _ in range(self._batch_size)]
        first, self._drawn = self._drawn, self._drawn + len(indices)
        return [{**self._dataset[index], NUMBER: number} for number, index in enumerate(indices, first)]

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, as JSON."""
        return {"drawn": self._drawn, "order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, also in the form of torchdata, which checkpoints had before."""
        self._drawn = int(state["drawn"])
        order = state.get("order")
        if (loader := state.get("loader")) is not None:
            order = loader["_sampler_iter_state"]["sampler_iter_state"]
        if order is not None:
            self._order.load_state_dict(order)


def demonstration_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """The sequences of all samples, with ``loss_mask [T]``."""
    return _packed([sequence for sample in samples for sequence in sample["sequences"]])


def preference_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """Two sequences for each sample, the preferred one first, as a unit; ``loss_mask [T]`` and ``chosen [B]``."""
    sequences = [sample[name] for sample in samples for name in ("chosen", "rejected")]
    batch = _packed(sequences, unit=torch.arange(len(samples)).repeat_interleave(2))
    return batch.with_sequences(**{CHOSEN: torch.tensor([True, False]).repeat(len(samples))})


def _packed(sequences: Sequence[tuple[list[int], list[bool]]], unit: Tensor | None = None) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [ids for ids, _ in sequences], tokens={"loss_mask": [mask for _, mask in sequences]}, unit=unit
    )
