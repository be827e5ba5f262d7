"""Post-training over any core-rl engine: algorithms, recipes, the training loop, and ``core-rl train``.

The names below are imported on first use (PEP 562), so that the command line loads this package without torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_rl_trainer.api import dry_run as dry_run
    from core_rl_trainer.api import train as train
    from core_rl_trainer.callbacks import Callback as Callback
    from core_rl_trainer.callbacks import CheckpointSaved as CheckpointSaved
    from core_rl_trainer.callbacks import EvaluationEnd as EvaluationEnd
    from core_rl_trainer.callbacks import Event as Event
    from core_rl_trainer.callbacks import RunEnd as RunEnd
    from core_rl_trainer.callbacks import RunFailed as RunFailed
    from core_rl_trainer.callbacks import StepEnd as StepEnd
    from core_rl_trainer.callbacks import StopRun as StopRun
    from core_rl_trainer.recipe.recipe import Recipe as Recipe
    from core_rl_trainer.recipe.recipe import load_recipe as load_recipe

__version__ = "0.1.0"

_HOMES = {
    "Callback": "core_rl_trainer.callbacks",
    "CheckpointSaved": "core_rl_trainer.callbacks",
    "EvaluationEnd": "core_rl_trainer.callbacks",
    "Event": "core_rl_trainer.callbacks",
    "Recipe": "core_rl_trainer.recipe.recipe",
    "RunEnd": "core_rl_trainer.callbacks",
    "RunFailed": "core_rl_trainer.callbacks",
    "StepEnd": "core_rl_trainer.callbacks",
    "StopRun": "core_rl_trainer.callbacks",
    "dry_run": "core_rl_trainer.api",
    "load_recipe": "core_rl_trainer.recipe.recipe",
    "train": "core_rl_trainer.api",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the names come from the one table)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'core_rl_trainer' has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
