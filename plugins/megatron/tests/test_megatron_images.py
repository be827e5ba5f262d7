"""Vision-language models that the Megatron engine cannot train with images: refused by name, before the build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megatron_support as support
import pytest
from transformers import AutoConfig

from core_rl.errors import ConfigError, CoreRLError, LayoutError, UnsupportedCapability
from core_rl_megatron.backend import MegatronBackend
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.translation import check_adapted

TEXT: dict[str, Any] = support.TINY | {
    "model_type": "qwen3_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]},
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
}
REFUSED: list[tuple[Mapping[str, Any], dict[str, int], type[CoreRLError], str]] = [
    (
        {"model_type": "gemma3"},
        {},
        UnsupportedCapability,
        r"no mapping for the model family 'gemma3'.*qwen3_vl",
    ),
    ({"model_type": "internvl"}, {}, UnsupportedCapability, r"no mapping for the model family 'internvl'"),
    ({"model_type": "qwen3_5"}, {}, UnsupportedCapability, r"no mapping for the model family 'qwen3_5'"),
    (
        {"model_type": "qwen3_vl_moe"},
        {},
        UnsupportedCapability,
        r"no mapping for the model family 'qwen3_vl_moe'",
    ),
    (support.TINY, {}, ConfigError, r"'qwen3' has no vision tower"),
    (
        QWEN3_VL,
        {"tp": 2, "sequence_parallel": True},
        LayoutError,
        r"sequence_parallel, and features of images",
    ),
    (
        QWEN3_VL
        | {"text_config": TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1]}}},
        {},
        UnsupportedCapability,
        r"mrope_section=\[2, 1, 1\].* half of head_dim=6",
    ),
    (QWEN3_VL, {"pp": 4}, LayoutError, r"leaves 1 layers on the first stage, .* the first 2; lower pp"),
]


def _config(model: Mapping[str, Any], layout: Mapping[str, int], vision: bool = True) -> MegatronConfig:
    config = support.config(layout=layout, config=dict(model), vision=vision)
    assert isinstance(config, MegatronConfig)
    return config


@pytest.mark.parametrize(("model", "layout", "error", "message"), REFUSED)
def test_images_of_unfit_model_are_refused(
    model: Mapping[str, Any], layout: dict[str, int], error: type[CoreRLError], message: str
) -> None:
    with pytest.raises(error, match=message):
        MegatronBackend().check_model(_config(model, layout))


def test_fit_vision_model_passes() -> None:
    MegatronBackend().check_model(_config(QWEN3_VL, {"tp": 2, "pp": 2}))


def test_vision_model_without_images_is_refused() -> None:
    with pytest.raises(UnsupportedCapability, match=r"set model.vision to true"):
        MegatronBackend().check_model(_config(QWEN3_VL, {}, vision=False))


def test_adapter_inside_a_tower_is_refused() -> None:
    model = AutoConfig.for_model(**QWEN3_VL)
    text = "model.language_model.layers.0.mlp.gate_proj.weight"
    check_adapted([text], model)
    with pytest.raises(UnsupportedCapability, match=r"'model.visual.*in the vision tower of 'qwen3_vl'"):
        check_adapted([text, "model.visual.blocks.0.mlp.linear_fc1.weight"], model)
