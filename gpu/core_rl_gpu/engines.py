"""Engines of one rank, or of one server, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from core_rl.config.base import parse_config
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.registry.engines import get_spec, load_config

__all__ = ["started"]

EngineT = TypeVar("EngineT", TrainEngine, InferenceEngine)


def started(kind: type[EngineT], name: str, values: Mapping[str, Any]) -> EngineT:
    """The engine ``name`` with the config ``values``, initialised in this process."""
    spec = get_spec(name)
    engine = load_engine(spec, parse_config(load_config(spec), values))
    assert isinstance(engine, kind)
    engine.initialize()
    return engine
