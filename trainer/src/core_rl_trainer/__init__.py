"""Post-training over any core-rl engine: algorithms, recipes, the training loop, and ``core-rl train``."""

from __future__ import annotations

from core_rl_trainer.loop.run import dry_run, run_recipe, train
from core_rl_trainer.recipe.recipe import Recipe, load_recipe

__all__ = ["Recipe", "__version__", "dry_run", "load_recipe", "run_recipe", "train"]

__version__ = "0.1.0"
