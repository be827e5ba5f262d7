"""The name of a model interface with its settings, as a recipe has it. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from core_rl.config.paths import ImportPath, NestedImportPaths


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ModelInterfaceAbstraction:
    """The name of an interface, and its settings."""

    type: ImportPath
    """A registered name, or ``"module:Class"``."""
    args: NestedImportPaths = Field(default_factory=dict)
    """Fields of the interface's config."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "type_" in values:
            raise ValueError(f"algorithm.type_ = {values['type_']!r}: the field is algorithm.type now")
        return values
