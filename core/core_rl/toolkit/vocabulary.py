"""A vocabulary whose rows are spread over ranks: sums and normalisers without gathering logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["VocabularyShard"]


@dataclass(frozen=True)
class VocabularyShard:
    """The consecutive ids ``start .. start + rows - 1``, whose logits this rank computes.

    The ranks of ``group`` hold the whole vocabulary between them and see the same tokens.
    """

    group: dist.ProcessGroup
    start: int

    def normaliser(self, own: Tensor) -> Tensor:
        """The log-sum-exp over the whole vocabulary, float32 ``[N]``, from that over this rank's rows."""
        parts = own.new_empty(dist.get_world_size(self.group), len(own))
        dist.all_gather(list(parts), own.contiguous(), group=self.group)
        return torch.logsumexp(parts, dim=0)

    def add_up(self, *own: Tensor) -> list[Tensor]:
        """Each tensor summed over the ranks, with one collective; all are 1-D of one dtype."""
        flat = torch.cat(own)
        dist.all_reduce(flat, group=self.group)
        return list(flat.split([len(part) for part in own]))

    def locate(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Rows of ``ids`` here (0 for those of other ranks), and whether they are here; both ``[N]``."""
        index = ids - self.start
        here = (index >= 0) & (index < rows)
        return torch.where(here, index, 0), here
