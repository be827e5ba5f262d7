"""A small context-parallel engine, so that the suite's checks and mutants have one to run on.

Light, as the module of a spec must be: neither torch nor transformers.
"""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import Profile

C = Capability
PROFILE = Profile(
    layouts=(ParallelLayout(cp=2), ParallelLayout(dp=2, cp=2), ParallelLayout(cp=4)),
    families=("qwen3", "llama", "qwen2", "gpt2"),
)
SPEC = EngineSpec(
    name="toy-cp",
    kind="train",
    protocol=(0, 3),
    factory="toy_cp.engine:ContextParallelBackend",
    config="core_rl.reference:ReferenceConfig",
    capabilities=frozenset(
        {
            C.VALUE_HEAD,
            C.REWARD_HEAD,
            C.LOGITS,
            C.DROPOUT,
            C.FROZEN_PARAMETERS,
            C.DATA_PARALLEL,
            C.CONTEXT_PARALLEL,
            C.SHARDED_CHECKPOINT,
            C.PORTABLE_CHECKPOINT,
            C.SYNC_DISK,
        }
    ),
    description="The tokens of a packed batch on several ranks, for the suite's own tests.",
    conformance="toy_cp:PROFILE",
)
