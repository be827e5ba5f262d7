"""Tiny models and configs for the tests of the torchtitan engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import train_support
from train_support import TINY, batch, weighted_nll

from core_rl.config.engine import TrainEngineConfig
from core_rl.launch.group import EngineGroup

__all__ = ["LLAMA", "MOE", "TINY", "batch", "config", "started", "weighted_nll"]
MOE = TINY | train_support.MOE | {"mlp_only_layers": [0]}
LLAMA = TINY | {"model_type": "llama", "tie_word_embeddings": False}


def config(
    engine: str = "torchtitan",
    layout: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **section: Any,
) -> TrainEngineConfig:
    """A config of ``engine`` for the tiny model, or for other fields; ``section`` adds to the model's section."""
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    return train_support.config_of(engine, TINY | dict(model or {}), optimizer, layout, options, **section)


def started(actual: TrainEngineConfig, engine: str = "torchtitan") -> EngineGroup:
    """A group of ``engine``, initialized."""
    return train_support.started(actual, engine)
