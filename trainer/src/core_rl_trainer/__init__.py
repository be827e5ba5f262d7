"""Post-training over any core-rl engine: algorithms, recipes, the training loop, and ``core-rl train``.

The names below are imported on first use (PEP 562), so that the command line loads this package without torch.
"""

from typing import TYPE_CHECKING

from core_rl.lazy import lazy_names as _lazy_names
from core_rl.lazy import load_name as _load_name

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

_HOMES = _lazy_names(__name__)

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the names come from the one table)


def __getattr__(name: str) -> object:
    return _load_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
