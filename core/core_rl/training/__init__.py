"""Training runs: recipes, and the loop behind ``core-rl train``."""

from __future__ import annotations

from core_rl.training.recipe import Recipe, load_recipe
from core_rl.training.run import dry_run, run_recipe, train

__all__ = ["Recipe", "dry_run", "load_recipe", "run_recipe", "train"]
