"""Batches of samples in the data order of a run, a pure function of seed and position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.media import Media
from core_rl.errors import CheckpointMismatch
from core_rl_trainer.algorithms.fields import CHOSEN
from core_rl_trainer.data.datasets import SampleDataset
from core_rl_trainer.data.encoding import Encoded
from core_rl_trainer.data.kinds import Sample, media_of
from core_rl_trainer.data.plain import NUMBER, ROW


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
        self._samples = [len(part) for part in dataset.parts]

    def __next__(self) -> list[Sample]:
        if self._limit is not None and self._drawn >= self._limit:
            raise StopIteration
        indices = [next(self._order) for _ in range(self._batch_size)]
        first, self._drawn = self._drawn, self._drawn + len(indices)
        return [self._sample(index, number) for number, index in enumerate(indices, first)]

    def _sample(self, index: int, number: int) -> Sample:
        return {**self._dataset[index], NUMBER: number, ROW: self._dataset.row_of(index)}

    def sample_at(self, place: Mapping[str, Any]) -> Sample:
        """The sample that `row_of` gave ``place`` for."""
        return self._sample(self._dataset.index_of(place["source"], place["row"]), place["group"])

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, and the number of samples of each source, as JSON."""
        return {"drawn": self._drawn, "order": self._order.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Raises `CheckpointMismatch` for sources with other numbers of samples than before."""
        if (before := state["samples"]) != self._samples:
            raise CheckpointMismatch(
                f"data.train: the sources had {before} samples when the checkpoint was written, and have "
                f"{self._samples} now; restore them"
            )
        self._drawn = int(state["drawn"])
        self._order.load_state_dict(state["order"])


def row_of(sample: Sample) -> Mapping[str, Any]:
    """The place of a sample of `NumberedBatches` as JSON."""
    source, row = sample[ROW]
    return {"source": source, "row": row, "group": sample[NUMBER]}


def demonstration_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """The sequences of all samples, with ``loss_mask [T]``."""
    sequences = [sequence for sample in samples for sequence in sample["sequences"]]
    media = [media for sample in samples for media in media_of(sample, len(sample["sequences"]))]
    return _packed(sequences, media)


def preference_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """Two sequences for each sample, the preferred one first, as a unit; ``loss_mask [T]`` and ``chosen [B]``."""
    sequences = [sample[name] for sample in samples for name in ("chosen", "rejected")]
    media = [media for sample in samples for media in media_of(sample, 2)]
    batch = _packed(sequences, media, unit=torch.arange(len(samples)).repeat_interleave(2))
    return batch.with_sequences(**{CHOSEN: torch.tensor([True, False]).repeat(len(samples))})


def _packed(
    sequences: Sequence[Encoded], media: Sequence[Media], unit: Tensor | None = None
) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [ids for ids, _ in sequences],
        tokens={"loss_mask": [mask for _, mask in sequences]},
        media=media if any(media) else (),
        unit=unit,
    )
