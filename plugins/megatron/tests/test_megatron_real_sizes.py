"""Layouts of published models at their real sizes: accepted, or refused by name. No weights, no ranks."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.translation import transformer_config

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
TP8_PP8 = {"tp": 8, "pp": 8, "sequence_parallel": True}
TP4_PP2 = {"tp": 4, "pp": 2, "sequence_parallel": True}
EP32 = {"dp": 32, "ep": 32}
NO_MAPPING = "has no mapping for the model family"
TABLE: list[tuple[dict[str, Any], dict[str, Any], type[Exception] | None, str]] = [
    (LLAMA_70B, TP8_PP8, None, ""),
    (LLAMA_70B, TP4_PP2, None, ""),
    (LLAMA_70B, EP32, LayoutError, "ep=32 for a model without experts"),
    (QWEN3_235B, TP8_PP8, LayoutError, "tp=8 does not divide num_key_value_heads=4"),
    (QWEN3_235B, TP4_PP2, None, ""),
    (QWEN3_235B, EP32, None, ""),
    ({"model_type": "deepseek_v3"}, EP32, UnsupportedCapability, f"{NO_MAPPING} 'deepseek_v3'"),
    ({"model_type": "gpt_oss"}, EP32, UnsupportedCapability, f"{NO_MAPPING} 'gpt_oss'"),
    ({"model_type": "qwen3_vl"}, TP4_PP2, UnsupportedCapability, f"{NO_MAPPING} 'qwen3_vl'"),
]


@pytest.mark.parametrize(
    ("model", "layout", "error", "says"),
    TABLE,
    ids=[f"{model['model_type']}-{ParallelLayout(**layout)}" for model, layout, _, _ in TABLE],
)
def test_layouts_of_published_models(
    model: dict[str, Any], layout: dict[str, Any], error: type[Exception] | None, says: str
) -> None:
    config = MegatronConfig(model=ModelConfig(config=model), layout=ParallelLayout(**layout))
    published = AutoConfig.for_model(**model)
    if error is not None:
        with pytest.raises(error, match=says):
            transformer_config(config, published)
        return
    found = transformer_config(config, published)
    assert (found.num_layers, found.hidden_size) == (published.num_hidden_layers, published.hidden_size)
    assert found.num_moe_experts == getattr(published, "num_experts", None)
