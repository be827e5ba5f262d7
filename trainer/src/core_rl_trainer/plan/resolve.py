"""`resolve`: the plan of a run from its recipe. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rl_trainer.plan.engine_config import EngineSections
from core_rl_trainer.plan.preflight import preflight
from core_rl_trainer.recipe.recipe import Recipe

if TYPE_CHECKING:
    from core_rl_trainer.plan.run_plan import RunPlan

__all__ = ["resolve"]


def resolve(recipe: Recipe, *, driver_here: bool = True) -> RunPlan:
    """Check ``recipe``, read its data, and decide on everything that the run needs. Nothing is started or written.

    Without ``driver_here`` the run starts on another machine, whose ports and servers are not checked. Raises
    `ConfigError` with every problem, before torch is imported where a check needs no torch.
    """
    engines = EngineSections(sections=recipe.engines, shared=recipe.engine_fields)
    trained = engines.configure_trained(recipe.engine, recipe.model, recipe.optimizer)
    remarks = preflight(recipe, driver_here=driver_here)

    from core_rl_trainer.plan.build import PlanBuilder

    return PlanBuilder(recipe, engines).build(trained, remarks, driver_here=driver_here)
