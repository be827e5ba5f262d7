"""What the conformance suite runs for the Megatron engine."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Setting

__all__ = ["PROFILE"]

PROFILE = Profile(
    layouts=(
        ParallelLayout(dp=1),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(dp=2),
        ParallelLayout(tp=2),
        ParallelLayout(tp=2, sequence_parallel=True),
        ParallelLayout(pp=2),
        ParallelLayout(cp=2),
        ParallelLayout(dp=2, tp=2, sequence_parallel=True),
        ParallelLayout(dp=2, pp=2),
        ParallelLayout(tp=2, cp=2, sequence_parallel=True),
        ParallelLayout(pp=2, cp=2),
    ),
    settings=(
        Setting(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2),
            options={"options": {"distributed_optimizer": True}},
        ),
        Setting(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2, pp=2),
            options={"options": {"distributed_optimizer": True, "recompute": "full"}},
        ),
        Setting(
            name="recompute", layout=ParallelLayout(tp=2), options={"options": {"recompute": "selective"}}
        ),
    ),
    dtypes=("float32", "bfloat16"),
    families=("qwen3", "llama", "qwen2"),
)
