"""Configs of the MindSpore engine, and of others for comparison, for a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_support import TINY

from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.launch.group import EngineGroup
from core_rl.registry.engines import get_spec, load_config
from core_rl_conformance.inputs.tiny_models import LLAMA3

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"pad_token_id": 7},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {**LLAMA3, "rope_theta": 1e4},
    },
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}
"""Changes of `engine_support.TINY`."""


def config(
    engine: str = "mindspore",
    changes: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **fields: Any,
) -> TrainEngineConfig:
    """A config of ``engine`` for the tiny model with ``changes``; ``model`` adds to its section."""
    section = {"config": TINY | dict(changes or {}), **(model or {})}
    values = {"device": "cpu", "model": section, "optimizer": {"lr": 1e-2}, **fields}
    actual = parse_config(load_config(get_spec(engine)), values, "a test's config")
    assert isinstance(actual, TrainEngineConfig)
    return actual


def started(engine: str = "mindspore", **fields: Any) -> EngineGroup:
    """A group of ``engine`` for `config`, initialized."""
    group = EngineGroup(get_spec(engine), config(engine, **fields))
    group.initialize()
    return group
