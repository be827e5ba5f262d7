"""What a plugin says about an engine before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

EngineKind = Literal["train", "inference"]

PROTOCOL_VERSION: tuple[int, int] = (0, 1)
"""The version of the interface that this core speaks: an engine works if its major number is equal
and its minor number is not larger."""


class Capability(StrEnum):
    """What is optional for an engine. Whatever a spec does not list is *not supported*."""

    # heads and outputs of a train engine
    VALUE_HEAD = "value_head"
    REWARD_HEAD = "reward_head"
    LOGITS = "logits"
    # layouts
    DATA_PARALLEL = "data_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    # training
    BFLOAT16 = "bfloat16"
    CUDA = "cuda"
    FROZEN_PARAMETERS = "frozen_parameters"
    LORA = "lora"
    MOE = "moe"
    ROUTING_REPLAY = "routing_replay"
    OFFLOAD = "offload"
    # state
    SHARDED_CHECKPOINT = "sharded_checkpoint"
    PORTABLE_CHECKPOINT = "portable_checkpoint"
    # weight sync: a train engine sends, an inference engine receives
    SYNC_DISK = "sync_disk"
    SYNC_TENSOR = "sync_tensor"
    SYNC_DISTRIBUTED = "sync_distributed"
    SYNC_LORA = "sync_lora"
    # inference
    SCORE = "score"
    TOP_LOGPROBS = "top_logprobs"
    PAUSE = "pause"
    RELEASE_MEMORY = "release_memory"
    LAUNCH_SERVER = "launch_server"


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine of a plugin: the object that an entry point of the group ``rl_engines`` names.

    The module that defines it must be light: it is imported to list engines, so it may import
    neither torch nor the backend. ``factory``, ``config`` and ``conformance`` are therefore
    ``"module:attribute"`` strings.
    """

    name: str
    """The name that users write, equal to the entry point's: lower case, digits and hyphens."""
    kind: EngineKind
    protocol: tuple[int, int]
    """The interface version that the plugin was written for; see `PROTOCOL_VERSION`."""
    factory: str
    """The engine class, a `TrainEngine` or an `InferenceEngine`."""
    config: str
    """Its config class, a `TrainEngineConfig` or an `InferenceEngineConfig`."""
    capabilities: frozenset[Capability] = frozenset()
    description: str = ""
    conformance: str | None = None
    """The profile that the conformance suite runs, ``"module:PROFILE"``."""

    def supports(self, capability: Capability) -> bool:
        """Whether the engine declares ``capability``."""
        return capability in self.capabilities
