"""`TokenShard`: which tokens of a packed batch a rank computes, and its attention to tokens of other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from core_rl.data.batch import SequenceBatch
from toy_cp.collectives import gather_parts, gather_tokens

ATTENTION = "toy_context_parallel"


class TokenShard:
    """Consecutive tokens of ``batch``, as many on each rank of ``group`` but for one.

    The models of transformers cannot run on no token at all, so a batch with fewer than ranks is filled up with
    sequences of one token, whose outputs are dropped.
    """

    def __init__(self, batch: SequenceBatch, group: dist.ProcessGroup) -> None:
        self.batch = batch
        self.group = group
        self.rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        added = max(0, ranks - batch.num_tokens)
        self.sizes = self.split_sizes(batch.num_tokens + added, ranks)
        self.start = sum(self.sizes[: self.rank])
        self.stop = self.start + self.sizes[self.rank]
        self.input_ids = F.pad(batch.input_ids, (0, added))
        self.positions = F.pad(batch.position_ids, (0, added))
        lengths = torch.tensor([*batch.lengths, *[1] * added], device=batch.input_ids.device)
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def split_sizes(self, tokens: int, ranks: int) -> tuple[int, ...]:
        return tuple(tokens // ranks + (rank < tokens % ranks) for rank in range(ranks))

    def own(self, value: Tensor) -> Tensor:
        """This rank's part of ``[T, ...]``."""
        return value[self.start : self.stop]

    def position_ids(self) -> Tensor:
        """Positions of this rank's tokens in their sequences."""
        return self.own(self.positions)

    def next_ids(self) -> Tensor:
        """The ids after this rank's tokens, be they on the next rank."""
        return self.own(self.input_ids.roll(-1))

    def visible(self) -> Tensor:
        """Bool ``[t, T]``: the tokens that each of this rank's attends to."""
        order = torch.arange(len(self.sequence), device=self.sequence.device)
        return (self.own(self.sequence)[:, None] == self.sequence) & (self.own(order)[:, None] >= order)

    def gathered(self, value: Tensor) -> Tensor:
        """``value [t, ...]`` of all ranks' tokens, ``[T, ...]``, for what all ranks compute alike."""
        return gather_tokens(value, self.sizes, self.group)[: self.batch.num_tokens]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        """``[1, heads, t, D]``: this rank's queries with the keys and values of all ranks."""
        both = gather_parts(torch.stack([key, value]), self.sizes, 3, self.group)
        return attention(query, *self.by_query_head(query, both), self.visible(), scale, dropout)

    def by_query_head(self, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[1, heads, T, D]`` out of ``[2, 1, kv_heads, T, D]``."""
        key, value = both.repeat_interleave(query.shape[1] // both.shape[2], dim=2)
        return key, value


class UlyssesShard(TokenShard):
    """All tokens for some of the heads inside the attention (arXiv:2309.14509), also with few key/value heads."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        queries = gather_parts(query, self.sizes, 2, self.group)
        both = gather_parts(torch.stack([key, value]), self.sizes, 3, self.group)
        keys, values = self.by_query_head(queries, both)
        heads = tuple(len(part) for part in torch.arange(queries.shape[1]).tensor_split(len(self.sizes)))
        first = sum(heads[: self.rank])
        mine = slice(first, first + heads[self.rank])
        visible = self.whole()
        result = attention(queries[:, mine], keys[:, mine], values[:, mine], visible, scale, dropout)
        return gather_parts(result, heads, 1, self.group)[:, :, self.start : self.stop]

    def whole(self) -> Tensor:
        """Bool ``[T, T]``: what every token attends to."""
        order = torch.arange(len(self.sequence), device=self.sequence.device)
        return (self.sequence[:, None] == self.sequence) & (order[:, None] >= order)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dropout: float) -> Tensor:
    """Plain products of ``[1, heads, t, D]`` with ``[1, heads, T, D]``."""
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), dropout) @ v


def sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shard: TokenShard,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface; ``shard`` comes through the model's forward."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return shard.attend(query, key, value, scale, dropout).transpose(1, 2), None


def register_attention() -> None:
    """Make `ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, sharded_attention)
