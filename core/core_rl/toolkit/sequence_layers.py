"""Layers with a state (recurrences, causal convolutions, linear attention) that restart at each packed sequence.

transformers computes them over a whole row: a state or a convolution then crosses from one sequence to the next
(transformers #46093). Here such a layer gets the sequences one by one, with sequences of similar length as rows of one
padded batch. It is causal, so what stands after the end of a sequence changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from core_rl.data.pinned import to_device
from core_rl.distributed.collectives import gather
from core_rl.distributed.comm import Comm
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.segments import Segments

__all__ = ["StatefulLayers", "stateful_layers"]

STATE = ("A_log", "recurrent_param", "slope_rate", "time_decay", "time_shift")
"""Parameters, buffers and submodules that only layers with a state have: Mamba and Gated DeltaNet, RG-LRU, lightning
attention, RWKV (its time mixing, and the shift of its channel mixing)."""


def stateful_layers(trunk: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``trunk`` with a state, by name; of one inside another, the outer one."""
    layers: dict[str, nn.Module] = {}
    for name, module in trunk.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if name and not inside and (convolves or any(hasattr(module, part) for part in STATE)):
            layers[name] = module
    return layers


class StatefulLayers:
    """Makes the layers of ``trunk`` with a state run on each of the sequences of `begin` alone, in place."""

    def __init__(self, trunk: nn.Module) -> None:
        self.layers = stateful_layers(trunk)
        self._pass: _Pass | None = None
        for name, layer in self.layers.items():
            layer.forward = torch.compiler.disable(partial(self._run, name, layer.forward))

    def begin(self, segments: Segments, device: torch.device) -> None:
        """Run on ``segments`` from now on.

        They stay in force until the next call: a block that activation checkpointing computes again in the backward
        pass must see the same.
        """
        plain = len(segments.bounds) == 2 and segments.context is None
        self._pass = _Pass.of(segments, device) if self.layers and not plain else None

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("segments", None)
        if self._pass is None:
            return forward(*args, **kwargs)
        call = _Call(name, self._pass, args, kwargs)
        return call.joined([forward(*rows[0], **rows[1]) for rows in call.batches()])


class _Call:
    """The arguments of one call of a layer, cut into batches of whole sequences, and its results put together."""

    def __init__(self, name: str, current: _Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.context, self.length, self.plan = name, current.context, current.length, current.plan
        self.arguments = tree_map_only(Tensor, self._whole, (args, kwargs))

    def batches(self) -> Iterator[Any]:
        """Positional and keyword arguments of each call."""
        for index in self.plan.rows:
            yield tree_map_only(Tensor, partial(self._rows, index), self.arguments)

    def joined(self, results: list[Any]) -> Any:
        """The result for this rank's tokens: ``[rows, L, ...]`` becomes ``[1, T, ...]``.

        In a tuple, tensors without an entry for each token become None: the state after the last token.
        """
        if isinstance(results[0], tuple):
            first, *extras = zip(*results, strict=True)
            states = (self.joined([*extra]) if self._for_each_token(extra) else None for extra in extras)
            return (self.joined([*first]), *states)
        if not self._for_each_token(results):
            raise UnsupportedCapability(
                f"the layer {self.name} does not return one entry for each token, so it cannot run on each sequence "
                "alone"
            )
        flat = torch.cat([result.flatten(0, 1) for result in results])
        return flat.index_select(0, self.plan.order)[None]

    def _for_each_token(self, results: Sequence[Any]) -> bool:
        return all(
            isinstance(result, Tensor) and result.shape[:2] == index.shape
            for result, index in zip(results, self.plan.rows, strict=True)
        )

    def _whole(self, value: Tensor) -> Tensor:
        """``value`` of all tokens, from this rank's; tensors without an entry for each token are refused."""
        if value.dim() < 2 or value.shape[:2] != (1, self.length):
            raise UnsupportedCapability(
                f"the layer {self.name} gets a tensor of shape {tuple(value.shape)}, which has no entry for each of "
                f"{self.length} packed tokens, so it cannot run on each sequence alone"
            )
        # Each rank uses another part of the result.
        return value if self.context is None else gather(value, self.context, 1, partial=True)

    def _rows(self, index: Tensor, value: Tensor) -> Tensor:
        rows: Tensor = value[0].index_select(0, index.flatten()).unflatten(0, index.shape)
        return rows


@dataclass(frozen=True)
class _Plan:
    """Batches of sequences, and where each token's result is in them."""

    rows: list[Tensor]
    """Positions of tokens, int64 ``[sequences, longest]``; a shorter sequence repeats its last token."""
    order: Tensor
    """For each token of this rank, its place in all batches laid end to end; int64 ``[T]``."""


@dataclass(frozen=True)
class _Pass:
    """Shared data of all stateful layers in the pass over one micro-batch."""

    context: Comm | None
    length: int
    """Tokens of this rank."""
    plan: _Plan

    @staticmethod
    def of(segments: Segments, device: torch.device) -> _Pass:
        context = segments.context
        ranks, rank = (1, 0) if context is None else (context.size, context.rank)
        length = segments.bounds[-1] // ranks
        return _Pass(context, length, _plan(segments.bounds, length * rank, length * (rank + 1), device))


def _plan(bounds: tuple[int, ...], start: int, stop: int, device: torch.device) -> _Plan:
    """Batches that give the results of the tokens ``start .. stop - 1``, which the tokens before them decide.

    Lengths inside a batch have the same power of two above them, so less than half of it is padding.
    """
    pieces = [(first, min(end, stop)) for first, end in pairwise(bounds) if first < stop and end > start]
    pieces = [piece for piece in pieces if piece[1] > piece[0]]
    by_size = sorted(pieces, key=lambda piece: (_size(piece), piece))
    batches = [list(batch) for _, batch in groupby(by_size, key=_size)]
    longest = [max(end - first for first, end in batch) for batch in batches]
    rows, order = [], torch.empty(stop - start, dtype=torch.long)
    begins = accumulate((len(batch) * size for batch, size in zip(batches, longest, strict=True)), initial=0)
    for batch, size, begin in zip(batches, longest, begins, strict=False):
        firsts, ends = torch.tensor(batch).unbind(1)
        index = torch.minimum(firsts[:, None] + torch.arange(size), ends[:, None] - 1)
        rows.append(index)
        places = begin + torch.arange(index.numel()).view_as(index)
        is_local = (index >= start) & (torch.arange(size) < (ends - firsts)[:, None])
        order[index[is_local] - start] = places[is_local]
    return _Plan([to_device(index, device) for index in rows], to_device(order, device))


def _size(piece: tuple[int, int]) -> int:
    return (piece[1] - piece[0] - 1).bit_length()
