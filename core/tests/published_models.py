"""Configs of published models at their real sizes, for tests that need no weights."""

from __future__ import annotations

from typing import Any

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_NEXT_80B: dict[str, Any] = {"model_type": "qwen3_next", "intermediate_size": 5120}
"""The other sizes are the defaults of transformers."""
DEEPSEEK_V3: dict[str, Any] = {"model_type": "deepseek_v3"}
"""The defaults of transformers are this model's."""
GPT_OSS_120B: dict[str, Any] = {"model_type": "gpt_oss"}
"""The same."""
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
