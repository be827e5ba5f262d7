"""Configs of the reference engines."""

from __future__ import annotations

from pydantic import Field

from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig

__all__ = ["ReferenceConfig", "ReferenceRolloutConfig"]


class ReferenceConfig(TrainEngineConfig):
    """The config of the engine ``reference``: the common fields and nothing else."""


class ReferenceRolloutConfig(InferenceEngineConfig):
    """The config of the engine ``reference-rollout``."""

    max_batch_size: int = Field(default=256, ge=1)
    """Requests that one call of ``generate`` serves at most."""
