"""A Llama in plain torch: one sequence at a time, queries, keys and values in one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core_rl.errors import UnsupportedCapability

SCALED = ("linear", "llama3")
"""Scalings of the rotary frequencies that do not depend on the length of a sequence, and scale nothing else."""


@dataclass(frozen=True)
class Rows:
    """A checkpoint tensor as rows of a parameter."""

    name: str
    parameter: nn.Parameter
    rows: slice


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.dropout = config.attention_dropout
        self.qkv = _matrix((self.heads + 2 * self.kv_heads) * self.dim, config.hidden_size)
        self.out = _matrix(config.hidden_size, self.heads * self.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[L, H]`` to ``[L, H]``."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = (x @ self.qkv.T).unflatten(1, (-1, self.dim)).transpose(0, 1).split(sizes)
        mixed = F.scaled_dot_product_attention(
            _rotated(query, cos, sin)[None],
            _rotated(key, cos, sin)[None],
            value[None],
            is_causal=True,
            enable_gqa=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return mixed[0].transpose(0, 1).flatten(1) @ self.out.T

    def checkpoint(self, prefix: str) -> Iterator[Rows]:
        """Checkpoint tensors."""
        ends = [self.heads * self.dim, (self.heads + self.kv_heads) * self.dim, len(self.qkv)]
        for name, start, end in zip("qkv", [0, *ends], ends, strict=False):
            yield Rows(f"{prefix}.{name}_proj.weight", self.qkv, slice(start, end))
        yield _whole(f"{prefix}.o_proj.weight", self.out)


class Layer(nn.Module):
    """Attention and a gated product, each after a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attention = Attention(config)
        self.before, self.between = (nn.Parameter(torch.ones(config.hidden_size)) for _ in range(2))
        self.gate_up = _matrix(2 * config.intermediate_size, config.hidden_size)
        self.down = _matrix(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[L, H]`` to ``[L, H]``."""
        x = x + self.attention(F.rms_norm(x, self.before.shape, self.before, self.eps), cos, sin)
        gate, up = (F.rms_norm(x, self.between.shape, self.between, self.eps) @ self.gate_up.T).chunk(
            2, dim=1
        )
        return x + (F.silu(gate) * up) @ self.down.T

    def checkpoint(self, prefix: str) -> Iterator[Rows]:
        """Checkpoint tensors."""
        half = len(self.gate_up) // 2
        yield from self.attention.checkpoint(f"{prefix}.self_attn")
        yield Rows(f"{prefix}.mlp.gate_proj.weight", self.gate_up, slice(0, half))
        yield Rows(f"{prefix}.mlp.up_proj.weight", self.gate_up, slice(half, None))
        yield _whole(f"{prefix}.mlp.down_proj.weight", self.down)
        yield _whole(f"{prefix}.input_layernorm.weight", self.before)
        yield _whole(f"{prefix}.post_attention_layernorm.weight", self.between)


class Llama(nn.Module):
    """The model of a ``llama`` config of transformers; raises `UnsupportedCapability` for any other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = getattr(config, "rope_parameters", None) or {}
        plain = rope.get("rope_type", "default") in ("default", *SCALED)
        plain = plain and getattr(config, "hidden_act", None) == "silu"
        if config.model_type != "llama" or not plain or config.attention_bias or config.mlp_bias:
            raise UnsupportedCapability(
                f"the engine 'tiny' runs plain models of type 'llama', and this is {config.model_type!r} with "
                f"rope_parameters={rope}; choose another engine"
            )
        self.config = config
        self.embedding = _matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = (
            self.embedding if config.tie_word_embeddings else _matrix(config.vocab_size, config.hidden_size)
        )
        self.rope = rope

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[L, V]`` of one sequence ``[L]``."""
        angles = torch.outer(torch.arange(len(ids), device=ids.device).float(), self._frequencies(ids.device))
        angles = angles.repeat(1, 2)
        x = F.embedding(ids, self.embedding, padding_idx=self.config.pad_token_id)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.rms_norm(x, self.norm.shape, self.norm, self.config.rms_norm_eps) @ self.head.T

    def _frequencies(self, device: torch.device) -> Tensor:
        """Frequencies of the rotation of each pair of a head's dimensions, ``[head_dim / 2]``."""
        if (scaled := self.rope.get("rope_type")) in SCALED:
            frequencies: Tensor = ROPE_INIT_FUNCTIONS[scaled](self.config, device)[0]
            return frequencies
        dim, theta = self.config.head_dim, float(self.rope["rope_theta"])
        plain: Tensor = theta ** -(torch.arange(0, dim, 2, device=device).float() / dim)
        return plain

    def checkpoint(self) -> Iterator[Rows]:
        """All tensors in a checkpoint."""
        yield _whole("model.embed_tokens.weight", self.embedding)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            yield from layer.checkpoint(f"model.layers.{number}")
        yield _whole("model.norm.weight", self.norm)
        if self.head is not self.embedding:
            yield _whole("lm_head.weight", self.head)


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * 0.02)


def _whole(name: str, parameter: nn.Parameter) -> Rows:
    return Rows(name, parameter, slice(None))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
