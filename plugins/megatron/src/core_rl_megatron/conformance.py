"""What the conformance suite runs for the Megatron engine."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile

__all__ = ["PROFILE"]

PROFILE = Profile(
    layouts=(ParallelLayout(dp=1),),
    families=("qwen3", "llama", "qwen2"),
)
