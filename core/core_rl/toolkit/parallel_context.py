"""Distribution of one copy of a model, its vocabulary and the tokens that it sees, over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.pinned import to_device
from core_rl.data.prefixes import PrefixTree
from core_rl.distributed.collectives import all_gather_single
from core_rl.distributed.comm import Comm
from core_rl.toolkit.segments import Segments


@dataclass(frozen=True)
class VocabularyShard:
    """The consecutive ids ``start .. start + rows - 1``, whose logits this rank computes.

    The ranks of ``group`` hold the whole vocabulary between them and see the same tokens.
    """

    group: dist.ProcessGroup
    start: int

    def normaliser(self, local: Tensor) -> Tensor:
        """The log-sum-exp over the whole vocabulary, float32 ``[N]``, from that over this rank's rows."""
        ranks = dist.get_world_size(self.group)
        parts = local.new_empty(ranks * len(local))
        all_gather_single(parts, local.contiguous(), group=self.group)
        return torch.logsumexp(parts.view(ranks, -1), dim=0)

    def add_up(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor summed over the ranks, with one collective; all are 1-D of one dtype."""
        flat = torch.cat(tensors)
        dist.all_reduce(flat, group=self.group)
        return list(flat.split([len(part) for part in tensors]))

    def locate(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Local rows of ``ids`` (0 for rows of other ranks), and whether they are local; both ``[N]``."""
        index = ids - self.start
        is_local = (index >= 0) & (index < rows)
        return torch.where(is_local, index, 0), is_local


@dataclass(frozen=True, kw_only=True)
class ModelShards:
    """The ranks that hold one copy of the model; all of them get the same batches."""

    context: Comm = field(default_factory=Comm)
    """Context parallel: each rank sees an equal part of the tokens."""
    tensor: Comm = field(default_factory=Comm)
    """Tensor parallel: each rank holds some heads, columns and vocabulary rows."""
    sequence_parallel: bool = False
    """Between the matrices, tokens are spread over the ranks of ``tensor`` as well."""

    def vocabulary(self, size: int) -> VocabularyShard | None:
        """This rank's part of a vocabulary of ``size``; None where it has all of it.

        It is cut as `torch.chunk` does: all parts but the last are equally large.
        """
        group = self.tensor.group
        return (
            None if group is None else VocabularyShard(group, -(-size // self.tensor.size) * self.tensor.rank)
        )

    def slice_of(self, batch: SequenceBatch, tree: PrefixTree | None = None) -> TokenSlice:
        """The tokens of ``batch``, or rows of its ``tree``, that this rank sees, on the batch's device."""
        ids, positions, bounds = batch.input_ids, batch.position_ids, tuple(batch.cu_seqlens.tolist())
        if tree is not None:
            kept = to_device(tree.kept, batch.device)
            ids, positions, bounds = ids[kept], positions[kept], tree.bounds
        multiple = self.context.size * (self.tensor.size if self.sequence_parallel else 1)
        padding = -len(ids) % multiple
        length = (len(ids) + padding) // self.context.size
        start = length * self.context.rank
        # Padding is a sequence of its own, which nobody attends to and nobody reads.
        segments = bounds + ((bounds[-1] + padding,) if padding else ())
        return TokenSlice(
            input_ids=_padded(ids, padding)[start : start + length],
            position_ids=_padded(positions, padding)[start : start + length],
            start=start,
            segments=segments,
            tree=tree,
        )


WHOLE = ModelShards()
"""One rank with the whole model and all tokens."""


@dataclass(frozen=True)
class TokenSlice:
    """Consecutive tokens of a packed batch, which is padded so that all ranks get equally many."""

    input_ids: Tensor
    """``[L]``."""
    position_ids: Tensor
    """``[L]``."""
    start: int
    """Position of the first one in the batch, or in the rows of ``tree``."""
    segments: tuple[int, ...]
    """Boundaries of the sequences, or of the stretches of ``tree``, of the whole padded batch."""
    tree: PrefixTree | None = None
    """Where sequences share tokens: the slice is of its rows."""

    def attention(self, context: Comm | None, tensor: Comm | None = None) -> Segments:
        """The segments that attention stays in; tokens are spread over ``context``, heads over ``tensor``."""
        if self.tree is None:
            return Segments(self.segments, context, tensor)
        number = len(self.tree.paths)
        padding = ((number,),) if len(self.segments) > number + 1 else ()
        return Segments(self.segments, context, tensor, self.tree.paths + padding)

    def part_of(self, values: Tensor) -> Tensor:
        """The part ``[..., L]`` of ``values [..., T]`` of all tokens; padding has zeros."""
        padded = F.pad(values, (0, self.segments[-1] - values.shape[-1]))
        return padded[..., self.start : self.start + len(self.input_ids)]

    def in_batch(self, values: Tensor, num_tokens: int) -> Tensor:
        """``values [rows, ...]`` of all ranks, padding included, for each of the ``num_tokens`` of the batch."""
        return values[:num_tokens] if self.tree is None else values[to_device(self.tree.rows, values.device)]

    def here(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``positions [N]`` of the batch lie here, as indices into it, and where they lie in the slice; all on
        the CPU, as the length of the result depends on them.
        """
        local = (positions if self.tree is None else self.tree.rows[positions]) - self.start
        which = ((local >= 0) & (local < len(self.input_ids))).nonzero().squeeze(1)
        return which, local[which]


def _padded(values: Tensor, count: int) -> Tensor:
    """``count`` entries more: 0, 1, 2, ... are ids and positions of any model that takes so many tokens."""
    if not count:
        return values
    return torch.cat([values, torch.arange(count, dtype=values.dtype, device=values.device)])
