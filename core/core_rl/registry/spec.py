"""`EngineSpec`: the declaration of an engine, light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core_rl.config.capability import Capability

EngineKind = Literal["train", "inference"]

PROTOCOL_VERSION: tuple[int, int] = (0, 2)
"""The version of the interface that this core speaks. The major number of an engine is equal; below 1.0 its minor
number is equal as well, and from 1.0 on it is not larger."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine of a plugin: the object that an entry point of the group ``rl_engines`` names.

    The module that defines it must be light: it is imported to list engines, so it may import
    neither torch nor the backend. ``factory``, ``config`` and ``conformance`` are therefore
    ``"module:attribute"`` strings.
    """

    name: str
    """The name that users write, equal to the entry point's: lower case, digits and hyphens."""
    kind: EngineKind
    protocol: tuple[int, int]
    """The interface version that the plugin was written for; see `PROTOCOL_VERSION`."""
    factory: str
    """The backend class, a `TrainBackend` or an `InferenceBackend`."""
    config: str
    """Its config class, a `TrainEngineConfig` or an `InferenceEngineConfig`."""
    capabilities: frozenset[Capability] = frozenset()
    description: str = ""
    conformance: str | None = None
    """The profile that the conformance suite runs, ``"module:PROFILE"``."""

    def supports(self, capability: Capability) -> bool:
        """True if the engine declares ``capability``."""
        return capability in self.capabilities
