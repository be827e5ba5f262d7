"""Conformance profiles of the engine `plain`."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile

# One server serves all tiny models in sequence: it loads any directory. Where yours serves
# few architectures, name their tiny models: families=("llama", "qwen3").
PROFILE = Profile(layouts=(ParallelLayout(), ParallelLayout(dp=2)), shared_servers=True)
