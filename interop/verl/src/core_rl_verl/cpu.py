"""The black boxes on a CPU, for which verl has no platform: this registers one before it imports them."""

from __future__ import annotations

import os

# Read when verl is imported.
os.environ["VERL_PLATFORM"] = "cpu"

from core_rl_verl.platform import register_cpu

__all__ = ["PPOBlackBox", "SFTBlackBox"]

register_cpu()

# What follows asks for the platform when it is imported.
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

from core_rl_verl.adapter import PPOBlackBox, SFTBlackBox  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithLMHead)
