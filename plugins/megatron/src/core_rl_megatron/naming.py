"""Boxes of checkpoint tensors in Megatron's parameters.

Megatron keeps queries, keys and values of a layer in one matrix, group by group (attention.py:
``[q of the group | k | v]`` for each key/value head), and gate and up projection in another (mlp.py:
``[gate | up]`` on each tensor parallel rank). A `RowBox` is a box of one checkpoint tensor in such a matrix.

mbridge has the same names; to use it would require vision models and ``einops``, which it imports undeclared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from core_rl.errors import EngineContractError
from core_rl_megatron.modules import PackedGPT

__all__ = ["FlatRange", "RowBox", "boxes_of"]


@dataclass(frozen=True)
class FlatRange:
    """Consecutive elements of a flattened parameter, or of values in its shape."""

    values: Tensor
    """One-dimensional, writable."""
    start: int
    """The first element's number in the parameter."""


@dataclass(frozen=True)
class RowBox:
    """Rows ``start .. stop - 1`` of a parameter: a box of the checkpoint tensor ``name``."""

    name: str
    start: int
    stop: int
    offsets: tuple[int, ...]
    """The first element of the box in the checkpoint tensor."""

    def cut(self, shape: tuple[int, ...], flat: FlatRange) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Offsets and views of the boxes that ``flat``, of a parameter of ``shape``, has of this one.

        A range may begin and end inside a row, so there are up to three: a part of a row, rows, a part of a row.
        """
        width = shape[1] if len(shape) == 2 else 1
        at = max(self.start * width, flat.start)
        end = min(self.stop * width, flat.start + len(flat.values))
        while at < end:
            row, column = divmod(at, width)
            rows = 0 if column else (end - at) // width
            count = rows * width or min(end - at, width - column)
            values = flat.values[at - flat.start : at - flat.start + count]
            first = (self.offsets[0] + row - self.start, *(offset + column for offset in self.offsets[1:]))
            yield first, values.view(rows or 1, -1) if len(shape) == 2 else values
            at += count


DIRECT = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
ROWWISE_IN_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def boxes_of(
    chunk: PackedGPT, tensor_rank: int, expert_rank: int
) -> Iterator[tuple[nn.Parameter, tuple[RowBox, ...]]]:
    """All parameters of ``chunk``, each once, and their boxes; rows that pad the vocabulary are in none."""
    namer = _Namer(chunk, tensor_rank, expert_rank)
    for name, parameter in chunk.named_parameters():
        yield parameter, tuple(namer.boxes(name, parameter))


class _Namer:
    """Names the boxes of one chunk's parameters."""

    def __init__(self, chunk: PackedGPT, tensor_rank: int, expert_rank: int) -> None:
        self._chunk = chunk
        self._config: TransformerConfig = chunk.config
        self._rank = tensor_rank
        self._expert_rank = expert_rank

    def boxes(self, name: str, parameter: nn.Parameter) -> Iterator[RowBox]:
        if name in DIRECT:
            yield (
                self._vocabulary(DIRECT[name], parameter)
                if "embed" in name
                else self._whole(DIRECT[name], parameter)
            )
        elif name == "output_layer.weight":
            yield from self._head(parameter)
        elif name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            layer = self._chunk.decoder.layers[int(number)].layer_number - 1
            yield from self._layer(f"model.layers.{layer}", rest, parameter)
        else:
            raise EngineContractError(f"Megatron's parameter {name!r} has no name in transformers")

    def _head(self, parameter: nn.Parameter) -> Iterator[RowBox]:
        if len(parameter) == 1:
            yield self._whole("score.weight", parameter)
        elif self._chunk.share_embeddings_and_output_weights:
            # The copy of the embedding that the last stage has of its own.
            yield self._vocabulary("model.embed_tokens.weight", parameter)
        else:
            yield self._vocabulary("lm_head.weight", parameter)

    def _layer(self, prefix: str, rest: str, parameter: nn.Parameter) -> Iterator[RowBox]:
        if rest in IN_LAYER:
            yield self._whole(f"{prefix}.{IN_LAYER[rest]}", parameter)
        elif rest in ROWWISE_IN_LAYER:
            yield self._columns(f"{prefix}.{ROWWISE_IN_LAYER[rest]}", parameter)
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._query_key_value(f"{prefix}.self_attn", rest.rpartition(".")[2], parameter)
        elif rest == "mlp.linear_fc1.weight":
            yield from self._gate_and_up(f"{prefix}.mlp", parameter, self._rank)
        elif rest.startswith("mlp.experts.local_experts."):
            number, _, kind = rest.removeprefix("mlp.experts.local_experts.").partition(".")
            here = (self._config.num_moe_experts or 0) // self._config.expert_model_parallel_size
            expert = f"{prefix}.mlp.experts.{self._expert_rank * here + int(number)}"
            if kind == "linear_fc1.weight":
                yield from self._gate_and_up(expert, parameter, 0)
            else:
                yield self._whole(f"{expert}.down_proj.weight", parameter)
        else:
            raise EngineContractError(
                f"Megatron's parameter {rest!r} of {prefix!r} has no name in transformers"
            )

    def _whole(self, name: str, parameter: nn.Parameter) -> RowBox:
        return RowBox(name, 0, len(parameter), (0,) * parameter.dim())

    def _columns(self, name: str, parameter: nn.Parameter) -> RowBox:
        """A matrix that sums over tensor parallel ranks: each has some of its columns."""
        return RowBox(name, 0, len(parameter), (0, self._rank * parameter.shape[1]))

    def _vocabulary(self, name: str, parameter: nn.Parameter) -> RowBox:
        """Rows of the vocabulary, without those that pad it."""
        first = self._rank * len(parameter)
        return RowBox(name, 0, min(len(parameter), self._chunk.true_vocab_size - first), (first, 0))

    def _query_key_value(self, prefix: str, kind: str, parameter: nn.Parameter) -> Iterator[RowBox]:
        size, all_groups = self._config.kv_channels, self._config.num_query_groups
        assert size is not None and all_groups is not None  # `transformer_config` sets both
        groups = all_groups // self._config.tensor_model_parallel_size
        queries = self._config.num_attention_heads // all_groups * size
        bounds = {
            "q": (0, queries),
            "k": (queries, queries + size),
            "v": (queries + size, queries + 2 * size),
        }
        for letter, (start, stop) in bounds.items():
            for group in range(groups):
                first = group * (queries + 2 * size)
                offset = (self._rank * groups + group) * (stop - start)
                offsets = (offset, *[0] * (parameter.dim() - 1))
                yield RowBox(f"{prefix}.{letter}_proj.{kind}", first + start, first + stop, offsets)

    def _gate_and_up(self, prefix: str, parameter: nn.Parameter, rank: int) -> Iterator[RowBox]:
        half = len(parameter) // 2
        yield RowBox(f"{prefix}.gate_proj.weight", 0, half, (rank * half, 0))
        yield RowBox(f"{prefix}.up_proj.weight", half, 2 * half, (rank * half, 0))
