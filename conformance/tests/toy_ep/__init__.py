"""A small expert-parallel engine, so that the suite's checks and mutants have one to run on.

Light, as the module of a spec must be: neither torch nor transformers.
"""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import MOE, Profile, Setting

C = Capability
PROFILE = Profile(
    layouts=(ParallelLayout(dp=2),),
    settings=(Setting(layout=ParallelLayout(dp=2, ep=2), expert_multiple=2),),
    families=(MOE,),
)
SPEC = EngineSpec(
    name="toy-ep",
    kind="train",
    protocol=(0, 3),
    factory="toy_ep.engine:ExpertParallelBackend",
    config="core_rl.reference:ReferenceConfig",
    capabilities=frozenset(
        {
            C.VALUE_HEAD,
            C.REWARD_HEAD,
            C.LOGITS,
            C.DROPOUT,
            C.FROZEN_PARAMETERS,
            C.MOE,
            C.DATA_PARALLEL,
            C.EXPERT_PARALLEL,
            C.SHARDED_CHECKPOINT,
            C.PORTABLE_CHECKPOINT,
            C.SYNC_DISK,
        }
    ),
    description="The experts of a model on several ranks, for the suite's own tests.",
    conformance="toy_ep:PROFILE",
)
