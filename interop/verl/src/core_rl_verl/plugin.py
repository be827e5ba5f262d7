"""Loaded by verl's entry-point group ``verl.plugins`` at ``import verl``: registers the train engines of core-rl."""

from __future__ import annotations

import os

from core_rl.registry.engines import list_engines
from core_rl_verl.platform import register_cpu

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    register_cpu()

# Both ask for the platform when they are imported.
from verl.workers.engine import EngineRegistry

from core_rl_verl.config import PREFIX
from core_rl_verl.engine import CoreRLEngine

STRATEGIES = [
    PREFIX + entry.name for entry in list_engines() if entry.spec is not None and entry.spec.kind == "train"
]
"""The values of ``actor_rollout_ref.actor.strategy`` and ``critic.strategy`` that name engines of core-rl."""

for model_type in ("language_model", "value_model"):
    EngineRegistry.register(model_type, STRATEGIES, device=["cuda", "cpu"])(CoreRLEngine)
