"""Log-probs of the reference policy for a whole dataset: computed once, before the first update, and kept on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_trainer.algorithms.fields import BEHAVIOUR, REFERENCE
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike
from core_rl_trainer.data.batches import MakeBatch
from core_rl_trainer.data.datasets import SampleDataset
from core_rl_trainer.data.kinds import Sample

__all__ = ["ReferenceCache"]

CHUNK = 64
"""Samples of one forward pass over the data, before it is cut into micro-batches."""


class ReferenceCache:
    """``ref_logprobs`` of the samples of a dataset, by their ``index``; float32, one tensor for each sample."""

    def __init__(self, values: Mapping[int, Tensor]) -> None:
        self._values = values

    @staticmethod
    def compute(
        interface: ModelInterface[Config],
        engine: TrainEngineLike,
        dataset: SampleDataset,
        make_batch: MakeBatch,
        mb_spec: MicroBatchSpec,
    ) -> ReferenceCache:
        """With the present weights of ``engine``: the initial weights."""
        values: dict[int, Tensor] = {}
        samples = [dataset[index] for index in range(len(dataset))]
        for first in range(0, len(samples), CHUNK):
            chunk = samples[first : first + CHUNK]
            batch = make_batch(chunk)
            logprobs = interface.inference(engine, batch, mb_spec)[BEHAVIOUR].float()
            lengths = [make_batch([sample]).num_tokens for sample in chunk]
            pieces = zip(chunk, logprobs.split(lengths), strict=True)
            values |= {sample["index"]: piece.clone() for sample, piece in pieces}
        return ReferenceCache(values)

    def add_to(self, batch: SequenceBatch, samples: Sequence[Sample]) -> SequenceBatch:
        """``batch``, made of ``samples``, with ``ref_logprobs [T]``."""
        return batch.with_tokens(
            **{REFERENCE: torch.cat([self._values[sample["index"]] for sample in samples])}
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file, renamed into place."""
        temporary = path.with_suffix(".tmp")
        save_file({str(index): value for index, value in self._values.items()}, temporary)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> ReferenceCache:
        """Read what `save` wrote."""
        return ReferenceCache({int(index): value for index, value in load_file(path).items()})
