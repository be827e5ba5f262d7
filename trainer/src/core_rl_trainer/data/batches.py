"""Batches of samples in the data order of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.algorithms.fields import CHOSEN
from core_rl_trainer.data.datasets import SampleDataset
from core_rl_trainer.data.kinds import Sample

__all__ = [
    "NUMBER",
    "MakeBatch",
    "NumberedBatches",
    "Sample",
    "demonstration_batch",
    "preference_batch",
    "prompt_loader",
]

MakeBatch = Callable[[Sequence[Sample]], SequenceBatch]

NUMBER = "_number"
"""The field of a sample that holds its position in the data order of the run."""


class _OrderedSampler(Sampler[int]):
    def __init__(self, dataset: SampleDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        return self._dataset.order(self._seed)


def prompt_loader(dataset: SampleDataset, batch_size: int, seed: int) -> StatefulDataLoader:
    """An endless loader of lists of ``batch_size`` samples. Its ``state_dict()`` is JSON.

    A pass over the data may end in the middle of a batch; the next one begins there.
    """
    sampler = _OrderedSampler(dataset, seed)
    with warnings.catch_warnings():
        # torchdata 0.11 calls what newer torch deprecates; it goes when a torchdata without it is required.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=list)


class NumberedBatches(Iterator[list[Sample]]):
    """The batches of a loader, each sample with its position in the data order; ``limit`` samples at most."""

    def __init__(self, loader: StatefulDataLoader, limit: int | None = None) -> None:
        self._loader = loader
        self._limit = limit
        self._batches: Iterator[list[Sample]] | None = None
        self._drawn = 0

    def __next__(self) -> list[Sample]:
        if self._limit is not None and self._drawn >= self._limit:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._loader)
        samples = next(self._batches)
        first, self._drawn = self._drawn, self._drawn + len(samples)
        return [{**sample, NUMBER: number} for number, sample in enumerate(samples, first)]

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, as JSON."""
        return {
            "drawn": self._drawn,
            "loader": self._loader.state_dict() if self._batches is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there; before the first batch is drawn."""
        assert self._batches is None
        self._drawn = int(state["drawn"])
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


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
