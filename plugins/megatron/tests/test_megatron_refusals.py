"""Refusals of models, layouts and versions, before anything is built and with the number to change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import importlib_metadata
import megatron_support as support
import pytest
from transformers import AutoConfig

from core_rl.errors import ConfigError, CoreRLError, LayoutError, UnsupportedCapability, UnsupportedPackage
from core_rl.registry.packages import refuse_packages
from core_rl_megatron import SPEC
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.translation import family_of, transformer_config

Fields = Mapping[str, Any]
REFUSED: list[tuple[Fields, Fields, Fields, type[CoreRLError], str]] = [
    ({"pp": 8}, {}, {}, LayoutError, r"8 stages for num_hidden_layers=4; lower pp"),
    ({"pp": 3}, {}, {}, LayoutError, r"= 3 does not divide num_hidden_layers=4; change pp"),
    ({"pp": 2}, {"virtual_stages": 4}, {}, LayoutError, r"8 stages for num_hidden_layers=4"),
    (
        {"tp": 3},
        {},
        {},
        LayoutError,
        r"(?s)tp=3 does not divide num_attention_heads=4.*num_key_value_heads=2",
    ),
    ({"tp": 4}, {}, {}, LayoutError, r"tp=4 does not divide num_key_value_heads=2"),
    ({"tp": 2}, {}, {"intermediate_size": 41}, LayoutError, r"tp=2 does not divide intermediate_size=41"),
    ({"tp": 2}, {}, {"vocab_size": 1}, LayoutError, r"tp=2 leaves ranks without a row of vocab_size=1"),
    ({"cp": 3}, {}, {}, LayoutError, r"4 attention heads cannot be spread over cp=3"),
    ({"dp": 2, "ep": 2}, {}, {}, LayoutError, r"ep=2 for a model without experts"),
    ({"dp": 4, "ep": 4}, {}, support.MOE, LayoutError, r"ep=4 does not divide num_experts=6"),
    (
        {},
        {},
        {"model_type": "gemma2"},
        UnsupportedCapability,
        r"no mapping for the model family 'gemma2'.*'fsdp'",
    ),
    ({}, {}, {"attention_bias": True}, UnsupportedCapability, r"attention_bias=True"),
    ({}, {}, {"hidden_act": "gelu"}, UnsupportedCapability, r"hidden_act='gelu'"),
]


@pytest.mark.parametrize(
    ("layout", "options", "model", "error", "says"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED]
)
def test_unfit_model_is_refused(
    layout: Fields, options: Fields, model: Fields, error: type[CoreRLError], says: str
) -> None:
    config = support.config(layout=layout, options=options, model=model)
    assert isinstance(config, MegatronConfig)
    with pytest.raises(error, match=says):
        transformer_config(config, AutoConfig.for_model(**(config.model.config or {})))


def test_every_family_is_known_by_its_name() -> None:
    assert family_of(AutoConfig.for_model("qwen2", use_sliding_window=False)) == {"add_qkv_bias": True}
    assert family_of(AutoConfig.for_model("qwen3_moe")) == {"qk_layernorm": True}


@pytest.mark.parametrize(
    ("version", "refused"), [("0.15.3", True), ("0.16.0", False), ("0.19.2", False), ("0.20.0rc1", False)]
)
def test_failing_megatron_version_is_refused(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron = [package for package in SPEC.packages if package.name == "megatron-core"]
    monkeypatch.setattr(importlib_metadata, "version", lambda name: version)
    refuse_packages.cache_clear()
    if not refused:
        refuse_packages("megatron", tuple(megatron))
        return
    with pytest.raises(
        UnsupportedPackage, match=rf"{version} is installed.*pip install 'megatron-core>=0.16"
    ):
        refuse_packages("megatron", tuple(megatron))


def test_the_spec_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, core_rl_megatron; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


PRELOADED = """
import sys, torch
import core_rl.launch.fork_server, core_rl_megatron
__import__(*core_rl_megatron.SPEC.preload)
sys.exit(torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork())
"""


@pytest.mark.nightly
def test_preloading_initialises_no_cuda() -> None:
    assert (
        subprocess.run([sys.executable, "-c", PRELOADED], env=dict(os.environ), check=False).returncode == 0
    )


REFUSED_BY_THE_ENGINE: list[tuple[dict[str, Any], type[CoreRLError], str]] = [
    ({"options": {"virtual_stages": 2}}, LayoutError, "virtual_stages=2 needs a pipeline"),
    (
        {"model": support.MOE, "router_aux_coef": 0.1, "options": {"recompute": "full"}},
        UnsupportedCapability,
        "has 'aux_loss' only where .* set it to 0, or layout.pp to 1",
    ),
    ({"frozen": ["*.layers.0.self_attn.q_proj.*"]}, ConfigError, "freeze all of these or none"),
    (
        {"model": support.MOE, "lora": {"rank": 2, "target_modules": ["gate_proj"]}},
        ConfigError,
        "gate_proj.* matches no linear layer.* experts take no adapter",
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fields", "error", "says"), REFUSED_BY_THE_ENGINE)
def test_the_engine_refuses(fields: dict[str, Any], error: type[CoreRLError], says: str) -> None:
    with pytest.raises(error, match=says):
        support.started(support.config(**fields))
