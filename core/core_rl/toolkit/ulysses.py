"""Context parallel attention by exchanging tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

import math

from torch import Tensor

from core_rl.distributed.collectives import all_to_all
from core_rl.distributed.comm import Comm
from core_rl.errors import LayoutError

__all__ = ["check_heads", "spread_heads"]


def check_heads(heads: int, context: int) -> None:
    """Raise `LayoutError` unless the query heads of one rank can be spread over ``context`` ranks."""
    if heads % context:
        raise LayoutError(
            f"{heads} attention heads cannot be spread over cp={context} ranks; choose a cp that divides {heads}"
        )


def spread_heads(query: Tensor, key: Tensor, value: Tensor, context: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens with some heads, from some tokens with all heads.

    Args:
        query: ``[1, heads, T / size, D]``; ``key`` and ``value`` have as many heads or fewer.

    Returns:
        ``[1, heads / size, T, D]``, and keys and values of just the heads that these queries look at.
    """
    check_heads(query.shape[1], context.size)
    copies = _copies(query.shape[1], key.shape[1], context.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    return (
        all_to_all(query, context, split=1, join=2),
        all_to_all(key, context, split=1, join=2),
        all_to_all(value, context, split=1, join=2),
    )


def _copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Copies of each key and value head, so that equally many go to each rank, in step with the queries."""
    fewest = math.lcm(kv_heads, ranks) // kv_heads
    return fewest if heads % (kv_heads * fewest) == 0 else heads // kv_heads
