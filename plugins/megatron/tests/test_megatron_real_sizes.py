"""Layouts of published models at their real sizes: accepted, or refused by name. No weights, no ranks."""

from __future__ import annotations

from typing import Any

import pytest
from published_models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_70B, QWEN3_235B, QWEN3_NEXT_80B
from transformers import AutoConfig

from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.translation import transformer_config
from core_rl_megatron.versions import packs_delta_net

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
    (DEEPSEEK_V3, EP32, UnsupportedCapability, f"{NO_MAPPING} 'deepseek_v3'"),
    (GPT_OSS_120B, EP32, UnsupportedCapability, f"{NO_MAPPING} 'gpt_oss'"),
    ({"model_type": "gemma3_text"}, TP4_PP2, UnsupportedCapability, f"{NO_MAPPING} 'gemma3_text'"),
    ({"model_type": "qwen3_vl"}, TP4_PP2, UnsupportedCapability, r"rope_parameters.mrope_section=\(\)"),
]
NEXT: list[tuple[dict[str, Any], type[Exception] | None, str]] = [
    ({"tp": 2, "pp": 4, "sequence_parallel": True}, None, ""),
    (EP32, None, ""),
    (TP4_PP2, LayoutError, "tp=4 does not divide num_key_value_heads=2"),
    ({"cp": 8}, LayoutError, "cp=8 of Gated DeltaNet"),
]
TABLE += [
    (QWEN3_NEXT_80B, layout, error, says)
    if packs_delta_net()
    else (QWEN3_NEXT_80B, layout, UnsupportedCapability, r"from 0\.18 on")
    for layout, error, says in NEXT
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
    actual = transformer_config(config, published)
    assert (actual.num_layers, actual.hidden_size) == (published.num_hidden_layers, published.hidden_size)
    assert actual.num_moe_experts == getattr(published, "num_experts", None)
