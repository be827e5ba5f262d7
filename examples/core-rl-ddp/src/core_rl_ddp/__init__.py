"""Replicated data parallelism as an engine of core-rl. Importing this package imports no torch."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.spec import EngineSpec

__all__ = ["SPEC"]

SPEC = EngineSpec(
    name="ddp",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_ddp.engine:DDPBackend",
    config="core_rl_ddp.config:DDPConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.DROPOUT,
            Capability.FROZEN_PARAMETERS,
            Capability.OPTIMIZER_RULES,
            Capability.MUON,
            Capability.ADAMW_8BIT,
            Capability.SHARED_PREFIX,
            Capability.OFFLOAD,
            Capability.TAPS,
            Capability.SHARDED_CHECKPOINT,
            Capability.RESHARDING,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
        }
    ),
    description="Replicated weights, gradients added up over ranks",
    conformance="core_rl_ddp.conformance:PROFILE",
)
