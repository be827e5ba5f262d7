"""The name of a model interface with its settings, as a recipe has it. Importing this module imports no torch."""

from __future__ import annotations

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from core_rl.config.paths import ImportPath, NestedImportPaths


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ModelInterfaceAbstraction:
    """The name of an interface, and its settings."""

    type: ImportPath
    """A registered name, or ``"module:Class"``."""
    args: NestedImportPaths = Field(default_factory=dict)
    """Fields of the interface's config."""
