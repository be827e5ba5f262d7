"""Embedding, log-probs and entropy where each rank holds some rows of the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from toy_tp.collectives import add_up, gather, largest


class Vocabulary:
    """The ``size`` rows of a vocabulary in consecutive parts over ``group``; the last one may be smaller."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self.group = group
        chunks = torch.arange(size).chunk(dist.get_world_size(group))
        self.sizes = tuple(len(chunk) for chunk in chunks)
        self.start = int(chunks[dist.get_rank(group)][0])

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """The rows ``ids [T]`` of the matrix whose part on this rank is ``weight [v, H]``."""
        mask, index = self.own_rows(ids, len(weight))
        return add_up(torch.where(mask[:, None], F.embedding(index, weight), 0.0), self.group)

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of ``ids [T]`` and entropies ``[T]`` from this rank's columns ``logits [T, v]``."""
        shifted = logits - self.highest(logits)[:, None]
        mask, index = self.own_rows(ids, logits.shape[1])
        drawn = self.total(torch.where(mask, shifted.gather(1, index[:, None]).squeeze(1), 0.0))
        weights = shifted.exp()
        partition = self.partition(weights)
        return drawn - partition.log(), self.entropy(shifted, weights, partition)

    def entropy(self, shifted: Tensor, weights: Tensor, partition: Tensor) -> Tensor:
        """``log Z - sum(w x) / Z``; every term that is combined here is equal on all ranks."""
        return partition.log() - self.total((weights * shifted).sum(-1)) / partition

    def partition(self, weights: Tensor) -> Tensor:
        """The softmax's denominators ``[T]``."""
        return self.total(weights.sum(-1))

    def full(self, logits: Tensor) -> Tensor:
        """All columns ``[T, V]``."""
        return gather(logits, self.sizes, self.group)

    def highest(self, logits: Tensor) -> Tensor:
        """The largest logit of each row, over all ranks."""
        return largest(logits.max(dim=-1).values, self.group)

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks."""
        return add_up(part, self.group)

    def own_rows(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Which of ``ids`` are rows of this rank, and their numbers in it (0 for the others)."""
        mask = (ids >= self.start) & (ids < self.start + count)
        return mask, torch.where(mask, ids - self.start, 0)
