"""A small pipeline-parallel engine, so that the suite's checks and mutants have one to run on.

Light, as the module of a spec must be: neither torch nor transformers.
"""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import Profile

C = Capability
PROFILE = Profile(
    layouts=(ParallelLayout(pp=2), ParallelLayout(dp=2, pp=2)), families=("qwen3", "llama", "qwen2")
)
SPEC = EngineSpec(
    name="toy-pp",
    kind="train",
    protocol=(0, 3),
    factory="toy_pp.engine:PipelineBackend",
    config="core_rl.reference:ReferenceConfig",
    capabilities=frozenset(
        {
            C.VALUE_HEAD,
            C.REWARD_HEAD,
            C.LOGITS,
            C.DROPOUT,
            C.FROZEN_PARAMETERS,
            C.DATA_PARALLEL,
            C.PIPELINE_PARALLEL,
            C.SHARDED_CHECKPOINT,
            C.PORTABLE_CHECKPOINT,
            C.SYNC_DISK,
        }
    ),
    description="The layers of a model on several ranks, for the suite's own tests.",
    conformance="toy_pp:PROFILE",
)
