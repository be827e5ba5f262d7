"""Conformance profile of the MindSpore engine."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Setting

PROFILE = Profile(
    layouts=(ParallelLayout(dp=1), ParallelLayout(dp=2)),
    settings=(
        Setting(name="recompute", layout=ParallelLayout(dp=1), options={"options": {"recompute": True}}),
    ),
    families=("qwen3", "llama", "qwen2"),
)
