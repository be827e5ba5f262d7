"""The config of the Megatron engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import TrainEngineConfig

__all__ = ["MegatronConfig", "MegatronOptions"]


class MegatronOptions(Config):
    """What only Megatron knows."""

    virtual_stages: int = Field(default=1, ge=1)
    """Parts of the model on each pipeline rank: with 2 or more the schedule is interleaved (arXiv:2104.04473), with
    smaller gaps and more communication. They and ``pp`` together must divide the number of layers."""
    distributed_optimizer: bool = False
    """Spread the float32 weights and the moments over data parallel ranks (ZeRO-1, arXiv:1910.02054)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass: those inside the attention, or of whole layers."""


class MegatronConfig(TrainEngineConfig):
    """The common config and Megatron's own section."""

    options: MegatronOptions = MegatronOptions()
