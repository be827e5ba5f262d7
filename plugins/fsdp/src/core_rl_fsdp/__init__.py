"""FSDP2 as a train engine of core-rl. Importing this package imports neither torch nor FSDP."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.packages import TORCH, TRANSFORMERS
from core_rl.registry.spec import EngineSpec

__all__ = ["SPEC"]

SPEC = EngineSpec(
    name="fsdp",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_fsdp.engine:FSDPBackend",
    config="core_rl_fsdp.config:FSDPConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
            Capability.EXPERT_PARALLEL,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.DROPOUT,
            Capability.FROZEN_PARAMETERS,
            Capability.OPTIMIZER_RULES,
            Capability.MUON,
            Capability.ADAMW_8BIT,
            Capability.MOE,
            Capability.AUX_LOSS,
            Capability.ROUTING_REPLAY,
            Capability.LORA,
            Capability.VISION,
            Capability.SHARED_PREFIX,
            Capability.OFFLOAD,
            Capability.TAPS,
            Capability.BFLOAT16,
            Capability.CUDA,
            Capability.SHARDED_CHECKPOINT,
            Capability.RESHARDING,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
            Capability.SYNC_LORA,
        }
    ),
    description="PyTorch FSDP2 (fully_shard) over Hugging Face models, packed, on CPU and CUDA",
    conformance="core_rl_fsdp.conformance:PROFILE",
    preload=("core_rl_fsdp.engine", "core_rl.toolkit.hf_backend"),
    packages=(TORCH, TRANSFORMERS),
)
