"""The reference engines: plain Hugging Face models, one process, eager, float32. Importing this imports no torch."""

from __future__ import annotations

from pydantic import Field

from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
from core_rl.registry.packages import TORCH, TRANSFORMERS
from core_rl.registry.spec import EngineSpec

__all__ = ["ROLLOUT_SPEC", "SPEC", "ReferenceConfig", "ReferenceRolloutConfig"]


class ReferenceConfig(TrainEngineConfig):
    """The config of the engine ``reference``: the common fields and nothing else."""


class ReferenceRolloutConfig(InferenceEngineConfig):
    """The config of the engine ``reference-rollout``."""

    max_batch_size: int = Field(default=256, ge=1)
    """Requests that one call of ``generate`` serves at most."""


SPEC = EngineSpec(
    name="reference",
    kind="train",
    protocol=(0, 3),
    factory="core_rl.reference.train:ReferenceBackend",
    config="core_rl.reference:ReferenceConfig",
    capabilities=frozenset(
        {
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
            Capability.OFFLOAD,
            Capability.TAPS,
            Capability.CUDA,
            Capability.SHARDED_CHECKPOINT,
            Capability.PORTABLE_CHECKPOINT,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
            Capability.SYNC_LORA,
        }
    ),
    description="The plain Hugging Face model, one sequence at a time: slow, simple, and the one to compare with",
    packages=(TORCH, TRANSFORMERS),
)

ROLLOUT_SPEC = EngineSpec(
    name="reference-rollout",
    kind="inference",
    protocol=(0, 3),
    factory="core_rl.reference.rollout:ReferenceRolloutBackend",
    config="core_rl.reference:ReferenceRolloutConfig",
    capabilities=frozenset(
        {
            Capability.CUDA,
            Capability.VISION,
            Capability.SCORE,
            Capability.TOP_LOGPROBS,
            Capability.RELEASE_MEMORY,
            Capability.STOP_STRINGS,
            Capability.MIN_P,
            Capability.REPETITION_PENALTY,
            Capability.PRESENCE_PENALTY,
            Capability.LOGIT_BIAS,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
            Capability.SYNC_LORA,
            Capability.SYNC_DELTA,
        }
    ),
    description="The plain Hugging Face model in this process, through generate()",
    packages=(TORCH, TRANSFORMERS),
)
