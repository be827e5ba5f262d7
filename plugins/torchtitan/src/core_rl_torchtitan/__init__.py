"""torchtitan as a train engine of core-rl. Importing this package imports neither torch nor torchtitan."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.packages import TORCH, TRANSFORMERS, PackageVersions
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="torchtitan",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_torchtitan.backend:TorchtitanBackend",
    config="core_rl_torchtitan.backend:TorchtitanConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
            Capability.EXPERT_PARALLEL,
            Capability.MOE,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.FROZEN_PARAMETERS,
            Capability.OPTIMIZER_RULES,
            Capability.MUON,
            Capability.ADAMW_8BIT,
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
        }
    ),
    description="torchtitan's models and parallelisation (tensor, context, expert, FSDP2), packed, CPU and CUDA",
    conformance="core_rl_torchtitan.conformance:PROFILE",
    # Without the engine's modules: torchtitan looks for a CUDA device where it is imported.
    preload=("core_rl.toolkit.hf_backend",),
    # Its configs, shardings and adapters change from one minor version to the next.
    packages=(TORCH, TRANSFORMERS, PackageVersions(name="torchtitan", tried="==0.3.*")),
)
