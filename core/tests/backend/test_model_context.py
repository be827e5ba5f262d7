"""The context of a model: what its rotary scaling makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from core_rl.backend.inference_backend import ModelLimits

LIMIT, ORIGINAL = 128, 32
LONG = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0} | BANDS


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


@pytest.mark.parametrize(
    ("model_type", "fields", "context"),
    [
        ("llama", {}, LIMIT),
        ("llama", rope("default"), LIMIT),
        ("qwen2", rope("yarn", factor=4.0), 4 * LIMIT),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4 * LIMIT),
        ("qwen3", rope("yarn", factor=16.0, original_max_position_embeddings=ORIGINAL), 16 * ORIGINAL),
        ("deepseek_v3", rope("yarn", factor=4, original_max_position_embeddings=ORIGINAL), LIMIT),
        ("llama", rope("yarn", factor=2.5, original_max_position_embeddings=ORIGINAL), 80),
        ("llama", rope("linear", factor=4.0), 4 * LIMIT),
        ("llama", rope("dynamic", factor=2.0), 2 * LIMIT),
        ("llama", {"rope_scaling": LLAMA3}, LIMIT),
        ("phi3", {"original_max_position_embeddings": ORIGINAL} | rope("longrope", **LONG), LIMIT),
        ("gemma3_text", rope("linear", factor=8.0), LIMIT),
        ("qwen2_5_vl", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, LIMIT),
        ("gpt2", {"n_positions": LIMIT}, LIMIT),
        ("bloom", {}, None),
    ],
)
def test_context_is_after_rotary_scaling(
    model_type: str, fields: dict[str, Any], context: int | None
) -> None:
    lengths = {} if model_type in ("gpt2", "bloom") else {"max_position_embeddings": LIMIT}
    config = AutoConfig.for_model(model_type, **lengths, **fields)
    assert ModelLimits.of(config).context_length == context


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_nested_and_layer_scalings_count(factor: float) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 1e4,
    }
    text = {"max_position_embeddings": LIMIT, "rope_parameters": scaling}
    assert (
        ModelLimits.of(AutoConfig.for_model("qwen3_vl", text_config=text)).context_length == factor * ORIGINAL
    )
    layers = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": scaling}
    config = AutoConfig.for_model("olmo3", max_position_embeddings=LIMIT, rope_parameters=layers)
    assert ModelLimits.of(config).context_length == factor * ORIGINAL
