"""HTTP servers as the inference engine `plain` of core-rl."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.registry.spec import EngineSpec

SPEC = EngineSpec(
    name="plain",
    kind="inference",
    protocol=(0, 3),
    factory="core_rl_plain.backend:PlainBackend",
    config="core_rl_plain.config:PlainConfig",
    capabilities=frozenset(
        {
            Capability.DATA_PARALLEL,  # several servers
            Capability.SCORE,
            Capability.TOP_LOGPROBS,
            Capability.SYNC_DISK,
            Capability.SYNC_TENSOR,
            Capability.PAUSE,
            Capability.LAUNCH_SERVER,
        }
    ),
    description="HTTP servers of a Hugging Face model.",
    conformance="core_rl_plain.conformance:PROFILE",
)
