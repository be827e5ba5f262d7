"""Boxes of checkpoint tensors in Megatron's parameters.

Megatron keeps queries, keys and values of a layer in one matrix, group by group (attention.py:
``[q of the group | k | v]`` for each key/value head), and gate and up projection in another (mlp.py:
``[gate | up]`` on each tensor parallel rank). A `RowBox` is a box of one checkpoint tensor in such a matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from core_rl.errors import EngineContractError
from core_rl_megatron.modules import PackedGPT, ScalarHead

Shape = tuple[int, ...]


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
    offsets: Shape
    """The first element of the box in the checkpoint tensor."""

    def cut(self, shape: Shape, flat: FlatRange) -> Iterator[tuple[Shape, Tensor]]:
        """Offsets and views of the boxes that ``flat``, of a parameter of ``shape``, has of this one.

        A range may begin and end inside a row, so a matrix has up to three: a part of a row, rows, a part of a row.
        """
        width = math.prod(shape[1:])
        begin = max(self.start * width, flat.start)
        end = min(self.stop * width, flat.start + len(flat.values))
        at = begin - flat.start
        for first, sizes in _boxes_of_range(shape, begin, end):
            count = math.prod(sizes)
            offsets = (first[0] - self.start, *first[1:])
            yield (
                tuple(map(sum, zip(self.offsets, offsets, strict=True))),
                flat.values[at : at + count].view(sizes),
            )
            at += count


def _boxes_of_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """First elements and sizes of the boxes that elements ``begin .. end - 1`` of a tensor of ``shape`` fill."""
    width = math.prod(shape[1:])
    while begin < end:
        row, column = divmod(begin, width)
        rows = 0 if column else (end - begin) // width
        if rows:
            yield (row, *(0,) * len(shape[1:])), (rows, *shape[1:])
            begin += rows * width
            continue
        last = min(width, column + end - begin)
        for first, sizes in _boxes_of_range(shape[1:], column, last):
            yield (row, *first), (1, *sizes)
        begin += last - column


NAMES: dict[str, tuple[str, int | None]] = {
    "embedding.word_embeddings": ("model.embed_tokens", 0),
    "decoder.final_layernorm": ("model.norm", None),
    "output_layer": ("lm_head", 0),
    "score": ("score", None),
    "input_layernorm": ("input_layernorm", None),
    "pre_mlp_layernorm": ("post_attention_layernorm", None),
    "self_attention.linear_proj": ("self_attn.o_proj", 1),
    "self_attention.q_layernorm": ("self_attn.q_norm", None),
    "self_attention.k_layernorm": ("self_attn.k_norm", None),
    "router": ("gate", None),
    "linear_fc2": ("down_proj", 1),
    "self_attention.out_proj": ("linear_attn.out_proj", 1),
    "self_attention.out_norm": ("linear_attn.norm", None),
    "shared_expert_gate": ("shared_expert_gate", None),
}
"""For Megatron's module in a layer or an MLP: transformers' module, and the dimension that tensor parallel ranks
divide. The fused modules are in `_parts`."""
GROUPED = {"experts.linear_fc1": ("gate_proj", "up_proj"), "experts.linear_fc2": ("down_proj",)}
"""Modules of `GroupedExperts`, and the projections of each expert in their weights."""
DELTA_NET = {
    "self_attention.in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "self_attention.conv1d": ("conv1d",),
    "self_attention": ("",),  # A_log and dt_bias
}
"""Modules of Gated DeltaNet that tensor parallel ranks divide by heads, and transformers' modules in their rows."""
ELSEWHERE = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".shared_experts.gate.": ".shared_expert_gate.",
    ".shared_experts.": ".shared_expert.",
}
"""Modules in others, and where transformers has them: TransformerEngine has a norm inside the linear layer after it."""
TOWER = "images.trunk."
"""Prefix of the vision tower in a chunk."""
MOVED = re.compile("|".join(map(re.escape, ELSEWHERE)))
IN_LAYER = re.compile(
    r"decoder\.layers\.(?P<layer>\d+)\.(?P<mlp>mlp\.(?:shared_expert\.)?)?"
    r"(experts\.local_experts\.(?P<expert>\d+)\.)?(?P<module>.+)"
)


def boxes_of(
    chunk: PackedGPT, tensor_rank: int, expert_rank: int
) -> Iterator[tuple[nn.Parameter, tuple[RowBox, ...]]]:
    """All parameters of ``chunk``, each once, and their boxes; rows that pad the vocabulary are in none."""
    for name, parameter in chunk.named_parameters():
        if name.startswith(TOWER):
            tower_name = f"model.{name.removeprefix(TOWER)}"
            yield parameter, (RowBox(tower_name, 0, len(parameter), (0,) * parameter.dim()),)
            continue
        path, _, kind = MOVED.sub(lambda match: ELSEWHERE[match[0]], name).rpartition(".")
        prefix, module, rank = _located(chunk, path, tensor_rank, expert_rank)
        columns, start, boxes = [0] * (parameter.dim() - 1), 0, []
        if NAMES.get(module, ("", None))[1] == 1:
            columns = [rank * parameter.shape[1]]
        for part, rows, first in _parts(chunk, module, len(parameter), rank):
            boxes.append(RowBox(f"{prefix}{part}.{kind}", start, start + rows, (first, *columns)))
            start += rows
        yield parameter, tuple(boxes)


def name_in_model(name: str, *, vision: bool) -> str:
    """The name of a parameter of `boxes_of` in a text model, or with ``vision``."""
    in_text = vision and name.startswith("model.") and not name.startswith("model.visual.")
    return f"model.language_model.{name.removeprefix('model.')}" if in_text else name


def _located(chunk: PackedGPT, path: str, tensor_rank: int, expert_rank: int) -> tuple[str, str, int]:
    """The prefix of a module in the checkpoint, Megatron's name after that, and the number of this rank's part."""
    if path == "output_layer" and isinstance(chunk.output_layer, ScalarHead):
        return "", "score", tensor_rank
    if path == "output_layer" and chunk.share_embeddings_and_output_weights:
        # The copy of the embedding that the last stage has of its own.
        return "", "embedding.word_embeddings", tensor_rank
    match = IN_LAYER.fullmatch(path)
    if match is None:
        return "", path, tensor_rank
    prefix = f"model.layers.{chunk.decoder.layers[int(match['layer'])].layer_number - 1}.{match['mlp'] or ''}"
    if match["module"].startswith("experts."):
        return prefix, match["module"], expert_rank
    if match["expert"] is None:
        return prefix, match["module"], tensor_rank
    experts = _expert_count(chunk.config)
    # An expert is whole on its rank.
    return f"{prefix}experts.{expert_rank * experts + int(match['expert'])}.", match["module"], 0


def _parts(chunk: PackedGPT, module: str, rows: int, rank: int) -> Iterable[tuple[str, int, int]]:
    """Modules of the checkpoint in the parameter of a ``module``, in order: name, number of rows, and the first row."""
    if module == "self_attention.linear_qkv":
        return _query_key_value(chunk.config, rank)
    if module in DELTA_NET:
        joined = module == "self_attention.in_proj" and chunk.joins_key_heads
        return (
            _by_key_head(chunk.config, rank) if joined else _delta_net(chunk.config, DELTA_NET[module], rank)
        )
    if module == "linear_fc1":
        half = rows // 2
        return [("gate_proj", half, rank * half), ("up_proj", half, rank * half)]
    if module in GROUPED:
        names, experts = GROUPED[module], _expert_count(chunk.config)
        size = rows // experts // len(names)
        local = range(rank * experts, (rank + 1) * experts)
        return [(f"experts.{expert}.{name}", size, 0) for expert in local for name in names]
    if module not in NAMES:
        raise EngineContractError(f"Megatron's parameters of {module!r} have no name in transformers")
    name, divided = NAMES[module]
    if divided != 0:
        return [(name, rows, 0)]
    return [(name, min(rows, chunk.true_vocab_size - rank * rows), rank * rows)]


def _expert_count(config: TransformerConfig) -> int:
    """Experts of one rank."""
    return int(config.num_moe_experts or 0) // int(config.expert_model_parallel_size)


def _query_key_value(config: TransformerConfig, rank: int) -> Iterator[tuple[str, int, int]]:
    size, all_groups = config.kv_channels, config.num_query_groups
    assert size is not None and all_groups is not None  # `transformer_config` sets both
    groups = all_groups // config.tensor_model_parallel_size
    heads = config.num_attention_heads // all_groups
    for group in range(rank * groups, (rank + 1) * groups):
        if config.attention_output_gate:
            # transformers has queries and gate of a head side by side, and Megatron all queries of a group first.
            for part in range(2):
                for head in range(group * heads, (group + 1) * heads):
                    yield "self_attn.q_proj", size, (2 * head + part) * size
        else:
            yield "self_attn.q_proj", heads * size, group * heads * size
        for letter in ("k", "v"):
            yield f"self_attn.{letter}_proj", size, group * size


def _delta_net(config: TransformerConfig, names: Sequence[str], rank: int) -> Iterator[tuple[str, int, int]]:
    """Rows of this rank's heads: queries, keys and values, which transformers has in one matrix, and the rest."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for name in names:
        sections = {
            "in_proj_qkv": (keys, keys, values),
            "conv1d": (keys, keys, values),
            "in_proj_z": (values,),
        }
        start = 0
        for section in sections.get(name, (config.linear_num_value_heads,)):
            rows = section // config.tensor_model_parallel_size
            yield f"linear_attn.{name}".removesuffix("."), rows, start + rank * rows
            start += section


def _by_key_head(config: TransformerConfig, rank: int) -> Iterator[tuple[str, int, int]]:
    """Rows of this rank's heads in matrices that have all rows of a key head, and of its value heads, side by side."""
    heads = config.linear_num_key_heads // config.tensor_model_parallel_size
    values = config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, values * config.linear_value_head_dim
    for name, sections in {"in_proj_qkvz": (key, key, value, value), "in_proj_ba": (values, values)}.items():
        start = 0
        for rows in sections:
            for head in range(rank * heads, (rank + 1) * heads):
                yield f"linear_attn.{name}", rows, head * sum(sections) + start
            start += rows
