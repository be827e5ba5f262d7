"""Tiny models and configs for the tests of the Megatron engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import train_support
from train_support import MOE, VOCABULARY, batch, plain_logprobs, weighted_nll

from core_rl.config.engine import TrainEngineConfig
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup

__all__ = [
    "MOE",
    "OPTIMIZER",
    "TINY",
    "VOCABULARY",
    "batch",
    "config",
    "plain_logprobs",
    "started",
    "weighted_nll",
]
TINY = train_support.TINY | {"num_hidden_layers": 4}
OPTIMIZER: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "schedule": {"type": "cosine", "total_steps": 20, "warmup_steps": 2},
}


def config(
    engine: str = "megatron",
    layout: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **section: Any,
) -> TrainEngineConfig:
    """A config of ``engine`` for the tiny model, or for other fields; ``section`` adds to the model's section."""
    return train_support.config_of(engine, TINY | dict(model or {}), OPTIMIZER, layout, options, **section)


def started(actual: TrainEngineConfig, engine: str = "megatron") -> EngineGroup:
    """A group of ``engine``, initialized."""
    return train_support.started(actual, engine)


def has_imported(_: TrainEngine, module: str) -> bool:
    """Whether this rank has imported ``module``."""
    return module in sys.modules


def receives_tensors(engine: TrainEngine) -> bool:
    """Whether this rank receives exported tensors."""
    return any(tensor is not None for _, tensor in engine.named_tensors("params"))
