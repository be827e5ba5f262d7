"""A small Llama in plain torch as an engine of core-rl. Importing this package imports no torch."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.spec import EngineSpec

__all__ = ["SPEC"]

SPEC = EngineSpec(
    name="tiny",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_tiny.engine:TinyBackend",
    config="core_rl.config.engine:TrainEngineConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.LOGITS,
            Capability.SHARDED_CHECKPOINT,
            Capability.RESHARDING,
            Capability.DROPOUT,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
        }
    ),
    description="A small Llama in plain torch, with weights on every rank",
    conformance="core_rl_tiny.conformance:PROFILE",
)
