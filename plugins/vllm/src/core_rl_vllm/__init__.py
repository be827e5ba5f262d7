"""vLLM as an inference engine of core-rl. Importing this package imports neither torch nor an HTTP client."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="vllm",
    kind="inference",
    protocol=(0, 3),
    factory="core_rl_vllm.backend:VllmBackend",
    config="core_rl_vllm.backend:VllmConfig",
    capabilities=frozenset(
        {
            Capability.BFLOAT16,
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.CUDA,
            Capability.SCORE,
            Capability.TOP_LOGPROBS,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.SYNC_DISTRIBUTED,
            Capability.SYNC_LORA,
            Capability.SYNC_DELTA,
            Capability.PAUSE,
            Capability.LAUNCH_SERVER,
            Capability.MIN_P,
            Capability.LOGIT_BIAS,
        }
    ),
    description="vLLM servers over HTTP, launched by the engine or found at given addresses",
    conformance="core_rl_vllm.conformance:PROFILE",
)
