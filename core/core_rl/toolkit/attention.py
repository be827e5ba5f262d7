"""Attention that stays inside each packed sequence, registered with transformers' attention interface."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from core_rl.distributed.collectives import all_to_all
from core_rl.distributed.comm import Comm
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.seeds import derive_seed
from core_rl.toolkit import cuda
from core_rl.toolkit.segments import Blocks, KernelCall, Segments

__all__ = [
    "PACKED_ATTENTION",
    "check_heads",
    "head_size",
    "packed_attention",
    "register_packed_attention",
    "spread_heads",
]

PACKED_ATTENTION = "core_rl_packed"
"""The ``attn_implementation`` of packed models. Unknown to transformers' mask interface, so no mask is built."""

KERNEL_MULTIPLE, KERNEL_WIDEST = 8, 256
"""Head dimensions that FlashAttention takes are multiples of the one, up to the other."""

UNKNOWN = ("position_bias", "sinks", "block_indices")
"""Keywords of attention that change its result and are not computed here: biases of scores, sinks that depend on the
query, and keys that the model chooses."""


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
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,  # transformers passes every keyword of its models on to the attention function
) -> tuple[Tensor, None]:
    """Causal attention inside each segment.

    Args:
        module: the attention layer that calls.
        query: ``[1, heads, T, D]``; ``key`` and ``value`` are ``[1, kv_heads, T, D]``.
        attention_mask: None; transformers makes none for `PACKED_ATTENTION`, and a model's own is refused.
        segments: the sequences. Where they are spread over ranks, the arguments hold this rank's tokens and all
            heads; inside, each rank has all tokens and some heads.
        scaling: of the scores, by default ``D ** -0.5``.
        dropout: probability of dropping an attention weight.
        sliding_window: tokens that a query sees, itself included.
        softcap: ``c * tanh(scores / c)`` (Gemma 2).
        others: ``s_aux`` is the attention sink of each head, ``[heads]``: a score that takes its part of the softmax
            and has no value (gpt-oss; arXiv:2309.17453). ``is_causal=False``, here or of ``module``, is refused, and
            so are biases of scores. All others change nothing.

    Returns:
        ``[1, T, heads, D]`` and no weights.
    """
    if segments is None:
        raise UnsupportedCapability(
            f"{type(module).__name__} gets no 'segments': its model does not pass keywords on to the attention layers"
        )
    _check(module, attention_mask, options)
    sinks: Tensor | None = options.get("s_aux")
    for comm in (segments.tensor, segments.context):
        if sinks is not None and comm is not None:  # in a backward pass only this rank's heads have gradients
            sinks = sinks.chunk(comm.size)[comm.rank]
    context = segments.context
    window = sliding_window if sliding_window is not None and sliding_window < segments.longest else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = _Call(segments, scale, dropout, window, softcap, sinks)
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


def _check(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise `UnsupportedCapability` for attention that is not computed here."""
    causal = options.get("is_causal")
    unsupported = {
        "a mask of its own": attention_mask is not None,
        "attention in both directions": not (
            getattr(module, "is_causal", True) if causal is None else causal
        ),
        **{f"{name!r}": options.get(name) is not None for name in UNKNOWN},
    }
    if any(unsupported.values()):
        raise UnsupportedCapability(
            f"{type(module).__name__} uses {', '.join(name for name, used in unsupported.items() if used)}, which "
            "packed attention does not compute"
        )


@dataclass(frozen=True)
class _Call:
    """Sequences and settings of one call of `packed_attention`; ``window`` is None where it hides nothing."""

    segments: Segments
    scaling: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def widest_square(self) -> int:
        """Visible tokens up to which a mask may be left to the kernel."""
        if self.softcap is not None or self.sinks is not None:
            return 0
        return self.segments.longest if self.window is None else self.window


def _attend(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """All tokens, ``[1, heads, T, D]`` to ``[1, T, heads, D]``, contiguous as of transformers' own functions."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    plain = call.softcap is None and call.sinks is None and call.dropout == 0.0 and not call.segments.blocks
    if cuda.on_cuda(query) and half and plain and query.shape[-1] <= KERNEL_WIDEST:
        return _varlen(query, key, value, call)
    plan = call.segments.kernel_calls(call.widest_square, query.device)
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    queries = _taken(rows[0], plan.queries).split([batch.count * batch.queries for batch in plan.calls])
    visible = [batch.count * batch.visible for batch in plan.calls]
    keys, values = (_taken(part, plan.keys).split(visible) for part in rows[1:])
    attended = [_attend_once(*parts, call) for parts in zip(plan.calls, queries, keys, values, strict=True)]
    return _taken(torch.cat(attended), plan.places)[None]


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    """Rows ``index [N]`` of ``[T, heads, D]``; all for None."""
    return rows if index is None else rows.index_select(0, index)


def _attend_once(batch: KernelCall, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """The stretches of one call of a kernel, ``[count * tokens, heads, D]`` each; the result has their tokens alone."""
    query, key, value = (
        part.unflatten(0, (batch.count, len(part) // batch.count)).transpose(1, 2)
        for part in (query, key, value)
    )
    computed = _segment(query, key, value, call, batch.blocks)
    return computed[:, :, -batch.length :].transpose(1, 2).flatten(0, 1)


def _segment(query: Tensor, key: Tensor, value: Tensor, call: _Call, blocks: Blocks = ()) -> Tensor:
    """One sequence, ``[1, heads, L, D]``; ``key`` and ``value`` may have the tokens before these as well.

    Tokens of each of the ``blocks`` see each other in both directions.
    """
    if cuda.on_cuda(query) and query.dtype == torch.float32:
        # With fewer heads of keys than of queries only the kernel that keeps all scores, [heads, L, L], takes float32.
        key, value = (_for_each_query_head(part, query.shape[1]) for part in (key, value))
    length, visible = query.shape[2], key.shape[2]
    mask = partial(_causal_mask, length, visible, call.window, query.device, blocks)
    if call.softcap is not None:
        return _softcapped(query, key, value, call, mask(), call.softcap)
    if call.sinks is not None:
        return _with_sinks(query, key, value, call, mask(), call.sinks)
    hides = bool(blocks) or length < visible or (call.window is not None and visible > call.window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask() if hides else None,
        is_causal=not hides,
        dropout_p=call.dropout,
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _for_each_query_head(part: Tensor, heads: int) -> Tensor:
    """``[1, kv_heads, L, D]`` as ``[1, heads, L, D]``."""
    return part.repeat_interleave(heads // part.shape[1], dim=1)


def _causal_mask(
    length: int, visible: int, window: int | None, device: torch.device, blocks: Blocks
) -> Tensor:
    """Which of ``visible`` tokens the last ``length`` of them see, ``[length, visible]``."""
    places = torch.arange(visible, device=device)
    distance = places[visible - length :, None] - places[None, :]
    sees = distance >= 0
    for start, end in blocks:
        sees[start:end, start:end] = True
    return sees if window is None else sees & (distance < window)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, mask: Tensor, softcap: float
) -> Tensor:
    key, value = (_for_each_query_head(part, query.shape[1]) for part in (key, value))
    capped = torch.tanh(query @ key.transpose(2, 3) * call.scaling / softcap) * softcap
    weights = F.softmax(capped.masked_fill(~mask, float("-inf")), dim=-1, dtype=torch.float32)
    return F.dropout(weights.to(query.dtype), call.dropout, training=call.dropout > 0) @ value


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, mask: Tensor, sinks: Tensor
) -> Tensor:
    """The sink is one more key, which all queries see: its score is in an entry that the other keys lack.

    So no kernel needs to know of it, and ``[heads, L, L]`` is never kept.
    """
    scores = (sinks.to(query.dtype) / call.scaling)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    sink = F.pad(torch.ones_like(key[:, :, :1, :1]), (query.shape[-1], 0))
    return F.scaled_dot_product_attention(
        torch.cat([query, scores], dim=3),
        torch.cat([sink, F.pad(key, (0, 1))], dim=2),
        F.pad(value, (0, 0, 1, 0)),
        attn_mask=F.pad(mask, (1, 0), value=True),
        dropout_p=call.dropout,
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _varlen(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """All sequences in one kernel; half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[-1]
    # With latent attention, values are narrower than queries and keys; the kernel wants them equal.
    common = -(-max(query.shape[-1], width) // KERNEL_MULTIPLE) * KERNEL_MULTIPLE
    segments, device = call.segments, query.device
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if cuda.NAMES_GROUPS else {}
    queries, keys, values = (_token_rows(part, common) for part in (query, key, value))
    seen = segments.seen(device)
    if seen is not None:
        keys, values = keys[seen], values[seen]
    out = varlen_attn(
        queries,
        keys,
        values,
        segments.starts(device),
        segments.visible_starts(device),
        max(segments.lengths),
        segments.longest,
        scale=call.scaling,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
    return out[None, :, :, :width]


def _token_rows(part: Tensor, width: int) -> Tensor:
    """``[1, heads, T, D]`` as ``[T, heads, width]``, with zeros behind what there is, which change no score."""
    rows, missing = part[0].transpose(0, 1), width - part.shape[-1]
    return (F.pad(rows, (0, missing)) if missing else rows).contiguous()


def head_size(config: PretrainedConfig) -> int:
    """The width of a head of a text model, which some families do not name."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
    heads, kv_heads = query.shape[1], key.shape[1]
    # Copies of each key and value head, so that equally many go to each rank, in step with the queries.
    copies = math.lcm(kv_heads, context.size) // kv_heads
    if heads % (kv_heads * copies):
        copies = heads // kv_heads
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    return (
        all_to_all(query, context, split=1, join=2),
        all_to_all(key, context, split=1, join=2),
        all_to_all(value, context, split=1, join=2),
    )
