"""Dense decoders as cells of MindSpore: Llama, Qwen2 and Qwen3 over packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mindspore import Parameter, Tensor, _Function, float32, float64, mint, nn, ops
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core_rl.data.batch import SequenceBatch
from core_rl.errors import UnsupportedCapability, raise_all
from core_rl.toolkit.attention import head_size
from core_rl_mindspore.crossing import to_mindspore

__all__ = ["Decoder", "PackedTokens", "check_family"]

FAMILIES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")
"""Scalings of rotary frequencies that do not depend on the length of a sequence, and scale nothing else."""

WIDEST = 1.25
SLACK = 8
"""A sequence is padded to at most its length times the first, plus the second."""
MOST_SCORES = 2**20
"""Scores of a head that are computed together, but for a sequence that has more by itself."""

Weights = Mapping[str, Parameter]


def check_family(config: PretrainedConfig) -> None:
    """Raise `UnsupportedCapability` for a model that `Decoder` does not compute."""
    if config.model_type not in FAMILIES:
        raise UnsupportedCapability(
            f"the engine 'mindspore' has no model of the family {config.model_type!r}; it has {', '.join(FAMILIES)}: "
            "use these, or the engine 'fsdp'"
        )
    raise_all(UnsupportedCapability, f"this {config.model_type!r} model", _variants(config))


def _variants(config: PretrainedConfig) -> Iterator[str]:
    """Settings of a known family that `Decoder` does not heed."""
    if config.hidden_act != "silu":
        yield f"hidden_act={config.hidden_act!r}; the engine 'mindspore' computes 'silu'"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        yield "sliding attention in some layers; the engine 'mindspore' computes full attention"
    if (kind := config.rope_parameters["rope_type"]) not in ROPES:
        yield f"rope_type={kind!r}; the engine 'mindspore' computes {', '.join(ROPES)}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor; the engine 'mindspore' turns all of each head"


@dataclass(frozen=True)
class SequenceGroup:
    """``B`` sequences of similar length, whose attention is computed together."""

    rows: Tensor
    """The tokens, int64 ``[B * L]``: of shorter ones the last token again, which no other of them sees."""
    mask: Tensor
    """Causal, ``[L, L]``: -inf above the diagonal."""


@dataclass(frozen=True)
class PackedTokens:
    """Inputs of a pass over the packed sequences of a batch."""

    ids: Tensor
    """int64 ``[T]``."""
    cos: Tensor
    """``[T, 1, head_dim]``, as ``sin``."""
    sin: Tensor
    groups: list[SequenceGroup]
    places: Tensor
    """The row of each token in the groups, one after another, int64 ``[T]``."""

    @staticmethod
    def of(batch: SequenceBatch, frequencies: torch.Tensor) -> PackedTokens:
        """The tokens of ``batch``, whose positions turn by ``frequencies [head_dim / 2]``."""
        angles = torch.outer(batch.position_ids.float(), frequencies).repeat(1, 2)[:, None]
        ids, cos, sin = map(to_mindspore, (batch.input_ids, angles.cos(), angles.sin()))
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
        groups, places, offset = [], torch.empty_like(batch.input_ids), 0
        for numbers in similar_lengths(lengths.tolist()):
            last = lengths[numbers][:, None] - 1
            position = torch.arange(int(last.max()) + 1)
            rows = (starts[numbers][:, None] + torch.minimum(position, last)).flatten()
            real = (position <= last).flatten().nonzero().squeeze(1)
            places[rows[real]] = offset + real
            mask = torch.full((len(position), len(position)), -torch.inf).triu(1)
            groups.append(SequenceGroup(to_mindspore(rows), to_mindspore(mask)))
            offset += len(rows)
        return PackedTokens(ids, cos, sin, groups, to_mindspore(places))


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of sequences in groups, by their ``lengths``."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest, group = lengths[number], groups[-1] if groups else []
        fits = (len(group) + 1) * longest**2 <= MOST_SCORES
        if group and fits and longest <= WIDEST * lengths[group[0]] + SLACK:
            group.append(number)
        else:
            groups.append([number])
    return groups


class Linear(nn.Cell):  # type: ignore[misc]
    """``[..., in]`` to ``[..., out]``, with a bias where the model has one."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.weight, self.bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")

    def construct(self, x: Tensor) -> Tensor:
        return mint.nn.functional.linear(x, self.weight, self.bias)


class RMSNorm(nn.Cell):  # type: ignore[misc]
    """The root mean square over the last dimension becomes 1, times a weight (arXiv:1910.07467)."""

    def __init__(self, weights: Weights, name: str, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weights[f"{name}.weight"], eps

    def construct(self, x: Tensor) -> Tensor:
        return self.weight * (x * mint.rsqrt(mint.mean(mint.square(x), -1, keepdim=True) + self.eps))


class Attention(nn.Cell):  # type: ignore[misc]
    """Causal attention with grouped queries, strictly inside each sequence."""

    def __init__(self, config: Any, weights: Weights, name: str) -> None:
        super().__init__()
        self.dim, self.kv_heads = head_size(config), config.num_key_value_heads
        self.groups = config.num_attention_heads // self.kv_heads
        self.query, self.key, self.value, self.out = (
            Linear(weights, f"{name}.{part}_proj") for part in "qkvo"
        )
        self.normed = f"{name}.q_norm.weight" in weights
        if self.normed:  # Qwen3
            self.query_norm, self.key_norm = (
                RMSNorm(weights, f"{name}.{part}_norm", config.rms_norm_eps) for part in "qk"
            )

    def construct(self, x: Tensor, tokens: PackedTokens) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        query, key, value = (
            part(x).reshape(len(x), -1, self.dim) for part in (self.query, self.key, self.value)
        )
        if self.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = _turned(query * self.dim**-0.5, tokens), _turned(key, tokens)
        mixed = [self._mixed(query, key, value, group) for group in tokens.groups]
        return self.out(ops.gather(mint.cat(mixed, 0), tokens.places, 0))

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> Tensor:
        """``[T, heads, dim]`` to ``[B * L, heads * dim]``."""
        length, dim = len(group.mask), self.dim
        count = len(group.rows) // length
        query, key, value = (ops.gather(part, group.rows, 0) for part in (query, key, value))
        query = mint.permute(query.reshape(count, length, self.kv_heads, self.groups, dim), (0, 2, 3, 1, 4))
        key, value = (
            mint.permute(part.reshape(count, length, self.kv_heads, dim), order).reshape(-1, *shape)
            for part, order, shape in (
                (key, (0, 2, 3, 1), (dim, length)),
                (value, (0, 2, 1, 3), (length, dim)),
            )
        )
        # Three dimensions: the gradient of a product of four fails for a single key head and a single token.
        scores = mint.bmm(query.reshape(-1, self.groups * length, dim), key)
        shares = _Softmax.apply(scores.reshape(-1, self.groups, length, length) + group.mask)
        mixed = mint.bmm(shares.reshape(-1, self.groups * length, length), value)
        mixed = mixed.reshape(count, self.kv_heads, self.groups, length, dim)
        return mint.permute(mixed, (0, 3, 1, 2, 4)).reshape(count * length, -1)


class _Softmax(_Function):  # type: ignore[misc]
    """Softmax over the last dimension, float32.

    MindSpore 2.10 has two faults on the CPU. Its float32 exponential is an approximation, which is 1e-5 off. And where
    the first gradient of a softmax in a process is over a single element, all later ones are wrong.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        wide = scores.astype(float64)
        powers = mint.exp(wide - mint.amax(wide, -1, keepdim=True))
        shares = (powers / powers.sum(-1, keepdim=True)).astype(float32)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        return shares * (grad - (grad * shares).sum(-1, keepdim=True))


def _turned(x: Tensor, tokens: PackedTokens) -> Tensor:
    """``[T, heads, dim]`` by rotary positions (arXiv:2104.09864)."""
    first, second = mint.chunk(x, 2, -1)
    return x * tokens.cos + mint.cat([-second, first], -1) * tokens.sin


class Layer(nn.Cell):  # type: ignore[misc]
    """Attention and a gated product, each after a norm."""

    def __init__(self, config: Any, weights: Weights, name: str) -> None:
        super().__init__()
        self.before = RMSNorm(weights, f"{name}.input_layernorm", config.rms_norm_eps)
        self.attention = Attention(config, weights, f"{name}.self_attn")
        self.between = RMSNorm(weights, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.gate, self.up, self.down = (
            Linear(weights, f"{name}.mlp.{part}_proj") for part in ("gate", "up", "down")
        )

    def construct(self, x: Tensor, tokens: PackedTokens) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        x = x + self.attention(self.before(x), tokens)
        inner = self.between(x)
        return x + self.down(mint.nn.functional.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Cell):  # type: ignore[misc]
    """The trunk of the model of ``config`` over ``weights``, by their names in transformers' module.

    With ``recompute``, the backward pass computes the activations of each layer again.
    """

    def __init__(self, config: Any, weights: Weights, *, recompute: bool) -> None:
        super().__init__()
        check_family(config)
        self.embedding, padding = weights["model.embed_tokens.weight"], config.pad_token_id
        self.padding = None if padding is None else padding % config.vocab_size  # a row without a gradient
        self.layers = nn.CellList(
            [Layer(config, weights, f"model.layers.{number}") for number in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(weights, "model.norm", config.rms_norm_eps)
        self.frequencies = _frequencies(config)
        if recompute:
            for layer in self.layers:
                layer.recompute(use_reentrant=False)

    def construct(self, batch: SequenceBatch) -> Tensor:
        """Hidden states ``[T, H]``."""
        tokens = PackedTokens.of(batch, self.frequencies)
        x = ops.gather(self.embedding, tokens.ids, 0)
        if self.padding is not None:
            x = mint.where((tokens.ids == self.padding)[:, None], ops.stop_gradient(x), x)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.norm(x)


def _frequencies(config: Any) -> torch.Tensor:
    """Frequencies of the rotation of each pair of a head's dimensions, ``[head_dim / 2]``."""
    if (kind := config.rope_parameters["rope_type"]) in ROPE_INIT_FUNCTIONS:
        scaled: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
        return scaled
    size = head_size(config)
    plain: torch.Tensor = 1.0 / config.rope_parameters["rope_theta"] ** (
        torch.arange(0, size, 2).float() / size
    )
    return plain
