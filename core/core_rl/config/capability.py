"""Optional features of an engine."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """Optional features of an engine. A feature that a spec does not list is *not supported*.

    The page "Write an engine" lists the duties of a backend for each.
    """

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
    DROPOUT = "dropout"
    FROZEN_PARAMETERS = "frozen_parameters"
    OPTIMIZER_RULES = "optimizer_rules"
    MUON = "muon"
    ADAMW_8BIT = "adamw_8bit"
    LORA = "lora"
    VISION = "vision"
    MOE = "moe"
    AUX_LOSS = "aux_loss"
    ROUTING_REPLAY = "routing_replay"
    SHARED_PREFIX = "shared_prefix"
    OFFLOAD = "offload"
    TAPS = "taps"
    # state
    SHARDED_CHECKPOINT = "sharded_checkpoint"
    RESHARDING = "resharding"
    PORTABLE_CHECKPOINT = "portable_checkpoint"
    # weight sync: a train engine sends, an inference engine receives
    SYNC_DISK = "sync_disk"
    SYNC_TENSOR = "sync_tensor"
    SYNC_DISTRIBUTED = "sync_distributed"
    SYNC_LORA = "sync_lora"
    SYNC_DELTA = "sync_delta"
    # inference
    SCORE = "score"
    TOP_LOGPROBS = "top_logprobs"
    PAUSE = "pause"
    RELEASE_MEMORY = "release_memory"
    LAUNCH_SERVER = "launch_server"
    # fields of SamplingParams that not every inference engine has
    STOP_STRINGS = "stop_strings"
    MIN_P = "min_p"
    REPETITION_PENALTY = "repetition_penalty"
    PRESENCE_PENALTY = "presence_penalty"
    LOGIT_BIAS = "logit_bias"
