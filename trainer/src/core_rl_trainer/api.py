"""`train` and `dry_run`: a run from its recipe. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.recipe.recipe import Recipe, RecipeSource, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from core_rl_trainer.callbacks import Callback
    from core_rl_trainer.plan.report import PlanReport


def train(
    recipe: RecipeSource,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a recipe with dotted ``overrides``; return the result as plain values.

    ``callbacks`` get the events of the run, after the callbacks of the recipe. An interrupted run resumes from its
    last complete checkpoint; a complete one is only reported. Progress goes to ``console``, by default to stderr.

    Raises `ConfigError` for errors in the recipe, before an engine starts; `CallbackError` for an error of a
    callback; `RunStopped` where a signal or ``stop_on`` ends the run.
    """
    return train_loaded(load_recipe(recipe, overrides), callbacks, console)


def train_loaded(
    recipe: Recipe, callbacks: Sequence[Callback] = (), console: Console | None = None
) -> dict[str, Any]:
    """`train`, for a recipe that `load_recipe` gave."""
    from rich.console import Console

    from core_rl.launch.process import end_if_rank_imports_script
    from core_rl_trainer.logs.progress import TerminalLog, print_line
    from core_rl_trainer.run.signals import StopSignals

    end_if_rank_imports_script()
    signals, log = StopSignals(), TerminalLog()
    with log.attached(), signals.caught():
        console = console or Console(stderr=True)
        print_line(console, "reading models and data …")
        plan = resolve(recipe)

        from core_rl_trainer.run.training import run_plan

        return run_plan(plan, callbacks, console, signals, log)


def dry_run(recipe: RecipeSource, overrides: Sequence[str] = ()) -> PlanReport:
    """The plan of `train` with the memory of each rank. The data is read; nothing starts, nothing is written."""
    return report_loaded(load_recipe(recipe, overrides))


def report_loaded(recipe: Recipe) -> PlanReport:
    """`dry_run`, for a recipe that `load_recipe` gave."""
    plan = resolve(recipe)

    from core_rl_trainer.plan.report import report_plan
    from core_rl_trainer.run.callbacks import Callbacks
    from core_rl_trainer.run.run_directory import find_source, recorded_identity, refuse_other_run

    Callbacks(plan.recipe)
    find_source(plan.files, plan.schedule.steps, plan.identity)
    if not plan.files.fresh and (before := recorded_identity(plan.files.directory)) is not None:
        refuse_other_run(plan.files.directory, before, plan.identity())
    return report_plan(plan)
