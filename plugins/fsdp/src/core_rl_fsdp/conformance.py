"""What the conformance suite runs for the FSDP engine."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile

__all__ = ["PROFILE"]

PROFILE = Profile(
    layouts=(
        ParallelLayout(dp=1),
        ParallelLayout(dp=2),
        ParallelLayout(dp=4),
        ParallelLayout(tp=2),
        ParallelLayout(tp=2, sequence_parallel=True),
        ParallelLayout(cp=2),
        ParallelLayout(dp=2, tp=2),
        ParallelLayout(dp=2, cp=2),
        ParallelLayout(cp=2, tp=2, sequence_parallel=True),
    ),
    dtypes=("float32", "bfloat16"),
)
