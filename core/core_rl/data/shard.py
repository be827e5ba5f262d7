"""The split of a batch over data-parallel ranks, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.data.partition import balanced, units

__all__ = ["shard", "shard_plan", "unshard_output"]


def shard_plan(batch: SequenceBatch, parts: int) -> list[list[int]]:
    """The sequences of each of ``parts`` ranks: nearly equal tokens, whole units, deterministic.

    A rank's list is empty when there are fewer units than ranks.
    """
    groups = units(batch)
    weights = [sum(batch.lengths[i] for i in group) for group in groups]
    return [[i for item in part for i in groups[item]] for part in balanced(weights, parts)]


def shard(batch: SequenceBatch, parts: int) -> list[SequenceBatch]:
    """One batch for each of ``parts`` ranks, as `shard_plan` says."""
    return batch.split(shard_plan(batch, parts))


def unshard_output(
    outputs: Sequence[ModelOutput], batch: SequenceBatch, plan: Sequence[Sequence[int]]
) -> ModelOutput:
    """Outputs of the parts in ``plan`` as one output in the order of ``batch``."""
    pairs = [(output, part) for output, part in zip(outputs, plan, strict=True) if part]
    if not pairs:
        return outputs[0] if outputs else ModelOutput()
    order = [index for _, part in pairs for index in part]
    joined = ModelOutput.concat([output for output, _ in pairs])
    return joined.reorder(batch.token_index(order), torch.tensor(order, dtype=torch.long))
