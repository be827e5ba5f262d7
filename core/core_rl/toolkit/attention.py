"""Attention that stays inside each packed sequence, registered with transformers' attention interface."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from core_rl.distributed.collectives import all_to_all
from core_rl.distributed.comm import Comm
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.seeds import derive_seed

__all__ = [
    "PACKED_ATTENTION",
    "Segments",
    "check_heads",
    "packed_attention",
    "register_packed_attention",
    "spread_heads",
]

PACKED_ATTENTION = "core_rl_packed"
"""The ``attn_implementation`` of packed models. Unknown to transformers' mask interface, so no mask is built."""


@dataclass(frozen=True)
class Segments:
    """Bounds of the sequences of a packed batch; an object, so that compiled code does not depend on their number."""

    bounds: tuple[int, ...]
    """``cu_seqlens`` of the whole batch as ``B + 1`` integers."""
    context: Comm | None = None
    """The ranks over which the tokens of the batch are spread, if they are."""
    tensor: Comm | None = None
    """The ranks over which the heads are spread, if they are; all else that is random is the same on them."""


def register_packed_attention(*, compiled: bool = False) -> None:
    """Make `PACKED_ATTENTION` known to transformers. Calling it twice does nothing more.

    With ``compiled`` it stays out of the graphs that ``torch.compile`` makes of the blocks around it:
    each batch has other sequences, and would have a graph of its own.
    """
    function = torch.compiler.disable(packed_attention) if compiled else packed_attention
    AttentionInterface.register(PACKED_ATTENTION, function)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  transformers passes it by position
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,  # transformers passes every keyword of its models on to the attention function
) -> tuple[Tensor, None]:
    """Causal attention inside each segment.

    Args:
        module: the attention layer that calls.
        query: ``[1, heads, T, D]``; ``key`` and ``value`` are ``[1, kv_heads, T, D]``.
        attention_mask: ignored; segments tell everything.
        segments: the sequences. Where they are spread over ranks, the arguments hold this rank's tokens and all
            heads; inside, each rank has all tokens and some heads.
        scaling: of the scores, by default ``D ** -0.5``.
        dropout: probability of dropping an attention weight.
        sliding_window: tokens that a query sees, itself included.
        softcap: ``c * tanh(scores / c)`` (Gemma 2).

    Returns:
        ``[1, T, heads, D]`` and no weights.
    """
    if unused.get("s_aux") is not None or unused.get("position_bias") is not None:
        raise UnsupportedCapability(
            f"{type(module).__name__} uses attention sinks or a position bias, which packed attention does not compute"
        )
    bounds, context = segments.bounds, segments.context
    longest = max(end - start for start, end in pairwise(bounds))
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    call = _Call(bounds, longest, scaling, dropout, window, softcap)
    if context is None or context.size == 1:
        with _own_draws(segments.tensor, dropout, query.device):
            return _attend(query, key, value, call), None
    query, key, value = spread_heads(query, key, value, context)
    with _own_draws(segments.tensor, dropout, query.device):
        attended = _attend(query, key, value, call)
    return all_to_all(attended, context, split=1, join=2), None


@contextmanager
def _own_draws(tensor: Comm | None, dropout: float, device: torch.device) -> Iterator[None]:
    """Random numbers of this rank's own inside the context, for the heads that no other rank of ``tensor`` has.

    They follow from a number that all of these ranks draw: outside of the context the ranks stay in step, and a pass
    that is recomputed draws the same again.
    """
    if dropout == 0.0 or tensor is None or tensor.size == 1:
        yield
        return
    common = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(common, tensor.rank))
        yield


@dataclass(frozen=True)
class _Call:
    """Sequences and settings of one call of `packed_attention`; ``window`` is None where it hides nothing."""

    bounds: tuple[int, ...]
    longest: int
    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None


def _attend(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """All tokens, ``[1, heads, T, D]`` to ``[1, T, heads, D]``."""
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if half and call.softcap is None and call.dropout == 0.0:
        return _varlen(query, key, value, call)
    # The backward of a split writes each gradient once; that of a slice writes zeros for all other segments.
    lengths = [end - start for start, end in pairwise(call.bounds)]
    segments = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_segment(q, k, v, call) for q, k, v in segments], dim=2).transpose(1, 2)


def _segment(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """One sequence, ``[1, heads, L, D]``."""
    if call.softcap is not None:
        return _softcapped(query, key, value, call, call.softcap)
    hides = call.window is not None and query.shape[2] > call.window
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_causal_mask(query.shape[2], call.window, query.device) if hides else None,
        is_causal=not hides,
        dropout_p=call.dropout,
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _softcapped(query: Tensor, key: Tensor, value: Tensor, call: _Call, softcap: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = call.scaling if call.scaling is not None else query.shape[-1] ** -0.5
    capped = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    mask = _causal_mask(query.shape[2], call.window, query.device)
    weights = F.softmax(capped.masked_fill(~mask, float("-inf")), dim=-1, dtype=torch.float32)
    return F.dropout(weights.to(query.dtype), call.dropout, training=call.dropout > 0) @ value


def _varlen(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """All sequences in one kernel; half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor(call.bounds, dtype=torch.int32, device=query.device)
    out = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        starts,
        starts,
        call.longest,
        call.longest,
        scale=call.scaling,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
    return out[None]


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
