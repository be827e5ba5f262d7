"""Positions: rotary embeddings whose frequencies depend on the length of a sequence, and learned absolute ones.

transformers takes the longest position of a forward pass for that length (`dynamic_rope_update`): in a packed batch a
short sequence would get the frequencies of its longest neighbour, and with ``dynamic`` of an earlier pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from core_rl.data.pinned import to_device
from core_rl.errors import BatchError
from core_rl.toolkit.parallel_context import TokenSlice

LEARNED = frozenset({"wpe", "embed_positions", "position_embeddings", "positions_embed"})
"""Names of tables of learned positions in transformers."""

RotaryOutput = Tensor | tuple[Tensor, ...]


def rotary_modules(trunk: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of ``trunk`` whose frequencies depend on the length of a sequence, in some layers."""
    return [
        module
        for module in trunk.modules()
        if any(kind == "longrope" or "dynamic" in kind for kind in _kinds(module).values())
    ]


def _kinds(module: nn.Module) -> Mapping[str | None, str]:
    """The rotary scaling of each layer type, or of all layers under None."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return kind
    return {None: kind} if isinstance(kind, str) else {}


def _regime(module: Any, layer_type: str | None, length: int) -> int:
    """A number that is the same for all lengths with the same frequencies."""
    kind = _kinds(module)[layer_type]
    if "dynamic" in kind:
        return max(length, int(module.original_max_seq_len))
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return int(length > parameters["original_max_position_embeddings"])
    return 0


def frequencies_change(model: nn.Module, first: int, last: int) -> bool:
    """Whether a sequence of ``last`` tokens has other rotary frequencies than ``first`` tokens."""
    return any(
        _regime(module, layer_type, first) != _regime(module, layer_type, last)
        for module in rotary_modules(model)
        for layer_type in _kinds(module)
    )


def make_rotary_stateless(model: nn.Module) -> None:
    """Let each forward pass start from the frequencies of the config: ``dynamic`` keeps a longer pass's."""
    for module in rotary_modules(model):
        module.register_forward_pre_hook(_reset)


def _reset(module: Any, _arguments: tuple[Any, ...] = ()) -> None:
    for layer_type, kind in _kinds(module).items():
        if "dynamic" in kind:
            prefix = "" if layer_type is None else f"{layer_type}_"
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))


class RotaryEmbeddings:
    """Makes the `rotary_modules` of ``trunk`` compute each sequence of `begin` as they would alone, in place."""

    def __init__(self, trunk: nn.Module) -> None:
        self.modules = rotary_modules(trunk)
        self._pieces: list[tuple[int, int, int]] = []
        for module in self.modules:
            module.forward = torch.compiler.disable(partial(self._run, module, module.forward))

    def begin(self, tokens: TokenSlice) -> None:
        """Run on ``tokens`` from now on, until the next call: blocks may be computed again in the backward pass."""
        if not self.modules:
            return
        stop = tokens.start + len(tokens.input_ids)
        self._pieces = [
            (max(first, tokens.start) - tokens.start, min(end, stop) - tokens.start, end - first)
            for first, end in pairwise(tokens.segments)
            if first < stop and end > tokens.start
        ]

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., RotaryOutput],
        x: Tensor,
        position_ids: Tensor,
        layer_type: str | None = None,
    ) -> RotaryOutput:
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        regimes: dict[int, list[tuple[int, int, int]]] = {}
        for piece in self._pieces:
            regimes.setdefault(_regime(module, layer_type, piece[2]), []).append(piece)
        results, indices = [], []
        for pieces in regimes.values():
            _reset(module)
            index = torch.cat([torch.arange(first, end) for first, end, _ in pieces])
            longest = max(length for _, _, length in pieces)
            results.append(forward(x, _with_last(position_ids, index, longest), **keywords))
            indices.append(index)
        if len(results) == 1:
            output: RotaryOutput = tree_map(lambda part: part[..., :-1, :], results[0])
            return output
        order = to_device(torch.cat(indices).argsort(), x.device)
        joined: RotaryOutput = tree_map(
            lambda *parts: torch.cat([part[..., :-1, :] for part in parts], -2).index_select(-2, order),
            *results,
        )
        return joined


def _with_last(position_ids: Tensor, index: Tensor, length: int) -> Tensor:
    """The positions at ``index`` of the last dimension, and the last position of a sequence of ``length`` tokens.

    Of a sequence that is cut, other ranks have the last one.
    """
    if len(index) < position_ids.shape[-1]:
        position_ids = position_ids.index_select(-1, to_device(index, position_ids.device))
    last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    return torch.cat([position_ids, last], dim=-1)


def require_positions(model: PreTrainedModel, limit: int | None, longest: int) -> None:
    """Raise `BatchError` for a sequence of ``longest`` tokens where the model has fewer `learned_positions`."""
    if limit is not None and longest > limit:
        raise BatchError(
            f"a sequence has {longest} tokens, and the model type {model.config.model_type!r} has learned positions "
            f"for {limit} (max_position_embeddings); shorten or drop longer sequences"
        )


def learned_positions(model: PreTrainedModel) -> int | None:
    """Positions in the table of learned ones, by the config; None without a table or a field for it."""
    tables = (
        name
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in LEARNED
    )
    if next(tables, None) is None:
        return None
    config = model.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((int(limit) for limit in limits if limit is not None), None)
