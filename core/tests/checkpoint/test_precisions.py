"""Precision of layers, by the quantization configs that the field writes."""

from __future__ import annotations

from typing import Any

import pytest

from core_rl.checkpoint.precisions import quantized_layers, shown_layers

BLOCKS = ("self_attn.q_proj", "mlp.gate", "mlp.down_proj")
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (9, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (9, 4),
    **{f"model.layers.{number}.{layer}.weight": (4, 4) for number in range(2) for layer in BLOCKS},
}
INT4 = {"num_bits": 4, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
Q, GATE, DOWN = (f"model.layers.*.{layer}" for layer in BLOCKS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, f"fp8: {Q}, {GATE}, {DOWN}"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"]},
            f"fp8: {Q}, {DOWN}, {GATE}",
        ),
        ({"quant_method": "fp8", "ignored_layers": ["gate", "self_attn"]}, f"fp8: {DOWN}"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT8}},
                "ignore": ["lm_head", "re:.*mlp.gate$"],
            },
            f"float8: {Q}, {DOWN}",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["re:.*q_proj"], "weights": FLOAT8},
                    "b": {"targets": ["re:.*down_proj"], "weights": INT4},
                },
            },
            f"float8: {Q}; int4: {DOWN}",
        ),
        ({"quant_method": "gptq", "bits": 8, "dynamic": {r"-:.*\.gate": {}}}, f"int8: {Q}, {DOWN}"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, f"int4: lm_head, {Q}, {GATE}, {DOWN}"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gat"]}, f"int4: {Q}, {DOWN}"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            f"nf4: {Q}, {GATE}, {DOWN}",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["mlp"]},
            f"int8: {Q}",
        ),
        ({"quant_method": "mxfp4"}, f"mxfp4: {Q}, {GATE}, {DOWN}"),
    ],
)
def test_quantized_layers_are_those_of_config(config: dict[str, Any], expected: str) -> None:
    assert shown_layers(quantized_layers(config, SHAPES)) == expected


def test_one_layer_of_many_keeps_its_precision() -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp.gate"]}
    layers = quantized_layers(config, SHAPES)
    assert "model.layers.1.mlp.gate" not in layers
    assert len(layers) == 5
