"""Specs and configs of the engines that a recipe names. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from core_rl.config.base import parse_config
from core_rl.config.engine import EngineConfig
from core_rl.errors import ConfigError
from core_rl.registry.engines import get_spec, load_config
from core_rl.registry.spec import EngineKind, EngineSpec
from core_rl_trainer.recipe.recipe import Recipe, RecipeSource, load_recipe

__all__ = ["check_recipe", "engine_config"]


def engine_config(
    recipe: Recipe,
    name: str,
    kind: EngineKind,
    fields: Mapping[str, Any],
    own: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[EngineSpec, EngineConfig]:
    """Spec and config of the engine ``name``: ``own`` comes before its section, which comes before ``fields``.

    Raises the errors of the registry, and `ConfigError` with every field that the engine refuses.
    """
    spec = get_spec(name)
    if spec.kind != kind:
        field = "engine" if kind == "train" else "rollout.engine"
        raise ConfigError(f"{field} = {name!r}: this engine is for {spec.kind}; name one for {kind}")
    common = {"dtype": recipe.dtype, "device": recipe.device, "seed": recipe.seed}
    section = recipe.engines.get(name, {})
    return spec, parse_config(load_config(spec), {**common, **fields, **section, **own}, f"engine {name!r}")


def check_recipe(source: RecipeSource, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe; raises what `load_recipe` raises, and `engine_config` for the train engine, without torch."""
    recipe = load_recipe(source, overrides)
    fields = {"model": {"path": recipe.model.path}, "optimizer": recipe.optimizer.model_dump()}
    engine_config(recipe, recipe.engine, "train", fields)
    return recipe
