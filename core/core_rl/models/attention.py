"""Attention that stays inside each packed sequence, registered with transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from core_rl.errors import UnsupportedCapability

__all__ = ["PACKED_ATTENTION", "packed_attention", "register_packed_attention"]

PACKED_ATTENTION = "core_rl_packed"
"""The ``attn_implementation`` of packed models. Unknown to transformers' mask interface, so no mask is built."""


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to transformers. Calling it twice does nothing more."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  transformers passes it by position
    *,
    segments: tuple[int, ...],
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
        segments: the boundaries ``cu_seqlens`` as ``B + 1`` integers.
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
    longest = max(end - start for start, end in zip(segments[:-1], segments[1:], strict=True))
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    if (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and dropout == 0.0
    ):
        return _varlen(query, key, value, segments, longest, scaling, window), None
    pieces = [
        _segment(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            scaling,
            dropout,
            window,
            softcap,
        )
        for start, end in zip(segments[:-1], segments[1:], strict=True)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One sequence, ``[1, heads, L, D]``."""
    grouped = query.shape[1] != key.shape[1]
    if softcap is not None:
        return _softcapped(query, key, value, scaling, dropout, window, softcap)
    if window is None or query.shape[2] <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    mask = _causal_mask(query.shape[2], window, query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~_causal_mask(query.shape[2], window, query.device), float("-inf"))
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[int, ...],
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """All sequences in one kernel; half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = torch.tensor(segments, dtype=torch.int32, device=query.device)
    out = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
    return out[None]
