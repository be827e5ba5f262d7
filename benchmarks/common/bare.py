"""Training steps written by hand, without core-rl, as a baseline for the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from common.workload import MODEL

CHUNK = 512
MicroBatch = tuple[Tensor, Tensor, list[int] | None, Tensor | None]
"""Token ids, positions, the bounds of packed sequences, and the mask of padded ones: arguments of `WithLoss`."""


def segment_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA on each packed sequence. Split, since the backward of a slice writes zeros for all other sequences."""
    lengths = [end - start for start, end in pairwise(kwargs["bounds"])]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=kwargs["scaling"])
        for q, k, v in zip(
            query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
        )
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def build(
    config: dict[str, Any], *, packed: bool, path: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The plain transformers model of ``config`` with drawn weights, or that of the directory ``path``."""
    AttentionInterface.register("bare_segments", segment_attention)
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "bare_segments" if packed else "sdpa", "dtype": dtype}
    if path is not None:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **options)
    return model.train()


@contextmanager
def model_directory(path: str | None) -> Iterator[str]:
    """The directory ``path``; without it, a temporary directory with the benchmarks' model."""
    with tempfile.TemporaryDirectory() as temporary:
        if path is None:
            build(MODEL, packed=False).save_pretrained(temporary)
        yield path or temporary


class WithLoss(nn.Module):
    """The model with its loss inside ``forward``, so that FSDP gathers the head for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, positions: Tensor, bounds: list[int] | None, mask: Tensor | None
    ) -> Tensor:
        """Sum of negative log-probs; ``ids`` and ``positions`` are ``[1, T]`` packed or ``[B, L]`` padded."""
        extra = {} if bounds is None else {"bounds": bounds}
        hidden = self.model.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **extra
        ).last_hidden_state
        keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        keep[:, 0] = False
        if bounds is not None:
            keep[0, bounds[:-1]] = False
        states, targets = hidden[:, :-1][keep[:, 1:]], ids[keep]
        total = hidden.new_zeros(())
        for chunk, labels in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
            total = total + F.cross_entropy(self.model.lm_head(chunk).float(), labels, reduction="sum")
        return total


def shard_model(model: nn.Module) -> nn.Module:
    """``fully_shard`` on each block and on the whole."""
    wrapped = WithLoss(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(wrapped)


def pack(ids: Sequence[Tensor], budget: int) -> list[MicroBatch]:
    """Equally many and balanced bins on all ranks."""
    loads: list[int] = []  # of the bins that first-fit-decreasing needs
    for length in sorted(map(len, ids), reverse=True):
        home = next((n for n, load in enumerate(loads) if load + length <= budget), None)
        if home is None:
            loads.append(length)
        else:
            loads[home] += length
    count = int(_over_ranks(len(loads), dist.ReduceOp.MAX))
    bins: list[list[Tensor]] = [[] for _ in range(count)]
    for row in sorted(ids, key=len, reverse=True):
        min(bins, key=lambda rows: sum(map(len, rows))).append(row)
    packed: list[MicroBatch] = []
    for rows in bins:
        bounds = [0, *accumulate(map(len, rows))]
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        packed.append((torch.cat(rows)[None], positions[None], bounds, None))
    return packed


def _over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return float(tensor)


def pad(ids: Sequence[Tensor], rows: int) -> list[MicroBatch]:
    """Right-padded micro-batches of ``rows`` sequences."""
    padded: list[MicroBatch] = []
    for start in range(0, len(ids), rows):
        part = list(ids[start : start + rows])
        tokens = nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in part], batch_first=True)
        padded.append((tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, mask))
    return padded


def bare_step(
    model: nn.Module, ids: Sequence[Tensor], cut: Callable[[Sequence[Tensor]], list[MicroBatch]]
) -> Callable[[], None]:
    """An optimizer step: forward, backward, clip, AdamW; ``cut``, as `pack`, is part of the step, as in the engine.

    ``model`` is what `shard_model` gives, or a plain model in one process.
    """
    module = model if isinstance(model, WithLoss) else WithLoss(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def step() -> None:
        optimizer.zero_grad()
        count = _over_ranks(sum(len(row) - 1 for row in ids), dist.ReduceOp.SUM)
        for micro_batch in cut(ids):
            (module(*micro_batch) * (ranks / count)).backward()  # FSDP averages gradients over the ranks
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step
