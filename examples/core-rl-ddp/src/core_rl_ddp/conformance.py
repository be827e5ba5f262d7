"""Conformance profiles of the engine `ddp`."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile

PROFILE = Profile(layouts=(ParallelLayout(dp=1), ParallelLayout(dp=2)))
