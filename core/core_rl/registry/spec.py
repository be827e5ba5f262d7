"""`EngineSpec`: the declaration of an engine, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core_rl.config.capability import Capability

EngineKind = Literal["train", "inference"]

PROTOCOL_VERSION: tuple[int, int] = (0, 1)
"""The version of the interface that this core speaks: an engine works if its major number is equal
and its minor number is not larger."""


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
    """The engine class, a `TrainEngine` or an `InferenceEngine`."""
    config: str
    """Its config class, a `TrainEngineConfig` or an `InferenceEngineConfig`."""
    capabilities: frozenset[Capability] = frozenset()
    description: str = ""
    conformance: str | None = None
    """The profile that the conformance suite runs, ``"module:PROFILE"``."""

    def supports(self, capability: Capability) -> bool:
        """True if the engine declares ``capability``."""
        return capability in self.capabilities
