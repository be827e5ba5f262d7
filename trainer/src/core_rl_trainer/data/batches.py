"""From encoded samples to packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.algorithms.fields import CHOSEN
from core_rl_trainer.data.datasets import Sample

__all__ = ["MakeBatch", "demonstration_batch", "preference_batch"]

MakeBatch = Callable[[Sequence[Sample]], SequenceBatch]


def demonstration_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """One sequence for each sample, with ``loss_mask [T]``."""
    return _packed([(sample["input_ids"], sample["loss_mask"]) for sample in samples])


def preference_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """Two sequences for each sample, the preferred one first, as a unit; ``loss_mask [T]`` and ``chosen [B]``."""
    batch = _packed([sample[name] for sample in samples for name in ("chosen", "rejected")])
    marks = torch.tensor([True, False]).repeat(len(samples))
    units = torch.arange(len(samples)).repeat_interleave(2)
    return replace(batch.with_sequences(**{CHOSEN: marks}), unit=units)


def _packed(sequences: Sequence[tuple[list[int], list[bool]]]) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [ids for ids, _ in sequences], tokens={"loss_mask": [mask for _, mask in sequences]}
    )
