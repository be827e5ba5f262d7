"""A small tensor-parallel engine, so that the suite's checks and mutants have one to run on.

Light, as the module of a spec must be: neither torch nor transformers.
"""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import Profile

C = Capability
PROFILE = Profile(
    layouts=(ParallelLayout(tp=2), ParallelLayout(dp=2, tp=2), ParallelLayout(tp=2, sequence_parallel=True)),
    families=("qwen3", "llama", "qwen2", "gemma2"),
)
SPEC = EngineSpec(
    name="toy-tp",
    kind="train",
    protocol=(0, 3),
    factory="toy_tp.engine:TensorParallelBackend",
    config="core_rl.reference:ReferenceConfig",
    capabilities=frozenset(
        {
            C.VALUE_HEAD,
            C.REWARD_HEAD,
            C.LOGITS,
            C.DROPOUT,
            C.FROZEN_PARAMETERS,
            C.LORA,
            C.DATA_PARALLEL,
            C.TENSOR_PARALLEL,
            C.SEQUENCE_PARALLEL,
            C.SHARDED_CHECKPOINT,
            C.PORTABLE_CHECKPOINT,
            C.SYNC_DISK,
        }
    ),
    description="Column- and row-parallel layers and a parallel vocabulary, for the suite's own tests.",
    conformance="toy_tp:PROFILE",
)
