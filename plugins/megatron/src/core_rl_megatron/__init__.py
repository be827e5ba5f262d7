"""Megatron-Core as a train engine of core-rl. Importing this package imports neither torch nor Megatron."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.packages import TORCH, TRANSFORMERS, FailingVersions, PackageVersions
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="megatron",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_megatron.backend:MegatronBackend",
    config="core_rl_megatron.config:MegatronConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.PIPELINE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
            Capability.EXPERT_PARALLEL,
            Capability.MOE,
            Capability.AUX_LOSS,
            Capability.ROUTING_REPLAY,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.SHARED_PREFIX,
            Capability.LORA,
            Capability.VISION,
            Capability.OFFLOAD,
            Capability.TAPS,
            Capability.CUDA,
            Capability.BFLOAT16,
            Capability.DROPOUT,
            Capability.FROZEN_PARAMETERS,
            Capability.OPTIMIZER_RULES,
            Capability.SHARDED_CHECKPOINT,
            Capability.RESHARDING,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
            Capability.SYNC_LORA,
        }
    ),
    description="NVIDIA Megatron-Core (tensor, pipeline, context and expert parallel), packed, CPU and CUDA",
    conformance="core_rl_megatron.conformance:PROFILE",
    preload=("core_rl_megatron.backend",),
    packages=(
        TORCH,
        TRANSFORMERS,
        # It looks into the optimizer and the schedules, which change from one minor version to the next.
        PackageVersions(
            name="megatron-core",
            tried=">=0.16.1,<0.20",
            failing=(FailingVersions(versions="<0.16", check="every check (its optimizer has no ParamKey)"),),
        ),
    ),
)
