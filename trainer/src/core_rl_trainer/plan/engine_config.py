"""Specs and configs of the engines that a recipe names. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from core_rl.config.base import parse_config
from core_rl.config.engine import EngineConfig, OptimizerConfig
from core_rl.errors import ConfigError
from core_rl.registry.engines import get_spec, load_config
from core_rl.registry.spec import EngineKind, EngineSpec
from core_rl_trainer.recipe.sections import ModelSection

ConfiguredEngine: TypeAlias = tuple[EngineSpec, EngineConfig]


@dataclass(frozen=True, kw_only=True)
class EngineSections:
    """The section ``engines`` of a recipe, and the fields that all engines share."""

    sections: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any]

    def of(self, name: str) -> Mapping[str, Any]:
        """The section of the engine ``name``."""
        return self.sections.get(name, {})

    def configure_trained(
        self, name: str, model: ModelSection, optimizer: OptimizerConfig
    ) -> ConfiguredEngine:
        """The train engine ``name`` of the trained model, before the head of its algorithm is known."""
        fields = {"model": model.model_dump(), "optimizer": optimizer.model_dump()}
        return self.configure(name, "train", fields, {})

    def configure(
        self, name: str, kind: EngineKind, fields: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> ConfiguredEngine:
        """Spec and config of the engine ``name``: ``overrides`` before its section, its section before ``fields``.

        Raises the errors of the registry, and `ConfigError` with every field that the engine refuses.
        """
        spec = get_spec(name)
        if spec.kind != kind:
            field = "engine" if kind == "train" else "rollout.engine"
            raise ConfigError(f"{field} = {name!r}: this engine is for {spec.kind}; name one for {kind}")
        values = {**self.shared, **fields, **self.of(name), **overrides}
        return spec, parse_config(load_config(spec), values, f"engine {name!r}")
