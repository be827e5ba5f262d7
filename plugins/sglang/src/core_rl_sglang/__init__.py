"""SGLang as an inference engine of core-rl. Importing this package imports neither torch nor an HTTP client."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="sglang",
    kind="inference",
    protocol=(0, 3),
    factory="core_rl_sglang.backend:SGLangBackend",
    config="core_rl_sglang.process:SglangConfig",
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
            Capability.RELEASE_MEMORY,
            Capability.LAUNCH_SERVER,
            Capability.MIN_P,
            # Not the penalties: on a real server the token just before is not yet counted (I8.sampling-pairs).
            Capability.LOGIT_BIAS,
            Capability.VISION,
        }
    ),
    description="SGLang servers over HTTP, launched by the engine or found at given addresses",
    conformance="core_rl_sglang.conformance:PROFILE",
)
