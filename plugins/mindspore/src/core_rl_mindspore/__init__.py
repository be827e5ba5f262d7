"""MindSpore as a train engine of core-rl. Importing this package imports neither torch nor MindSpore."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.packages import TORCH, TRANSFORMERS, FailingVersions, PackageVersions
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="mindspore",
    kind="train",
    protocol=(0, 3),
    factory="core_rl_mindspore.backend:MindSporeBackend",
    config="core_rl_mindspore.backend:MindSporeConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,
            Capability.VALUE_HEAD,
            Capability.REWARD_HEAD,
            Capability.LOGITS,
            Capability.FROZEN_PARAMETERS,
            Capability.OPTIMIZER_RULES,
            Capability.SHARDED_CHECKPOINT,
            Capability.RESHARDING,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
        }
    ),
    description="Dense Llama, Qwen2 and Qwen3 in MindSpore, data parallel, packed, on the CPU",
    conformance="core_rl_mindspore.conformance:PROFILE",
    packages=(
        TORCH,
        TRANSFORMERS,
        PackageVersions(name="mindspore", tried="==2.10.*"),
        PackageVersions(
            name="numpy",
            tried=">=1.26,<2",
            failing=(FailingVersions(versions=">=2", check="every MindSpore kernel, compiled for numpy 1"),),
        ),
    ),
)
