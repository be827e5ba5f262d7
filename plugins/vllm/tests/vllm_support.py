"""What tests of the vLLM engine share: a tiny model, and engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from core_rl import get_spec, load_config, load_engine
from core_rl.config.base import parse_config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_vllm.backend import VllmBackend

HEAD_SIZE = 32
"""The smallest that vLLM's attention on CPUs has."""


def tiny_model(root: Path, seed: int = 0) -> str:
    """The directory of a tiny model."""
    return str(ModelStore(root).directory(TinyModel(family="llama", seed=seed, head_size=HEAD_SIZE)))


def build(model: str, dp: int = 1, **options: Any) -> InferenceEngine:
    """The engine of ``model``."""
    spec = get_spec("vllm")
    values = {"model": {"path": model}, "layout": {"dp": dp}, "device": "cpu", "options": options}
    config = parse_config(load_config(spec), values)
    assert isinstance(config, InferenceEngineConfig)
    return load_engine(spec, config)


def backend_of(engine: InferenceEngine) -> VllmBackend:
    """The backend behind ``engine``."""
    backend = engine._backend
    assert isinstance(backend, VllmBackend)
    return backend


def complete(engine: InferenceEngine, *requests: LLMRequest) -> list[LLMResponse]:
    """The responses to ``requests``, which run at the same time."""

    async def all_of_them() -> list[LLMResponse]:
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(all_of_them())
