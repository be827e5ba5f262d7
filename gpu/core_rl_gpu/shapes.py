"""Shapes of published models, and a tiny one for rehearsals."""

from __future__ import annotations

from typing import Any

__all__ = ["PEAKS", "QWEN3_0_6B", "QWEN3_1_7B", "QWEN3_8B", "TINY", "model_flops"]

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by the makers' data sheets (SXM)."""

_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
}
QWEN3_0_6B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_1_7B: dict[str, Any] = {**QWEN3_0_6B, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_8B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def model_flops(shape: dict[str, Any], lengths: list[int]) -> float:
    """Of forward and backward, three times the forward pass: 2 for each weight of a matrix and token, and for causal
    attention 2 x heads x head size x length of the sequence for each token and layer.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    attention = 2 * queries * shape["num_hidden_layers"]
    forward: int = sum(2 * weights * length + attention * length * length for length in lengths)
    return 3.0 * forward
