"""Replicated data parallelism as an engine of core-rl. Importing this package imports no torch."""

from __future__ import annotations

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.registry.spec import EngineSpec

__all__ = ["SPEC", "DDPConfig", "DDPOptions"]


class DDPOptions(Config):
    """Options of this engine alone."""

    bucket_bytes: int = Field(default=25 * 2**20, ge=1)
    """Gradients are added up over ranks together up to this size, in bytes."""


class DDPConfig(TrainEngineConfig):
    """The common config and the engine's own section."""

    options: DDPOptions = DDPOptions()


SPEC = EngineSpec(
    name="ddp",
    kind="train",
    protocol=(0, 2),
    factory="core_rl_ddp.engine:DDPBackend",
    config="core_rl_ddp:DDPConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.FROZEN_PARAMETERS,
            Capability.OFFLOAD,
            Capability.SHARDED_CHECKPOINT,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
        }
    ),
    description="Replicated weights, gradients added up over ranks",
    conformance="core_rl_ddp.conformance:PROFILE",
)
