"""`EngineSpec`: the declaration of an engine and its check, light to import."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from core_rl.config.capability import Capability
from core_rl.errors import EngineBroken, EngineIncompatible, raise_all
from core_rl.registry.objects import is_reference
from core_rl.registry.packages import PackageVersions, wrong_packages

__all__ = ["CONTRACT_PAGE", "PROTOCOL_VERSION", "EngineKind", "EngineSpec", "check_spec"]

EngineKind = Literal["train", "inference"]

PROTOCOL_VERSION: tuple[int, int] = (0, 3)
"""The version of the interface that this core speaks. The major number of an engine is equal; below 1.0 its minor
number is equal as well, and from 1.0 on it is not larger.

It moves with each change by which an engine of the version before would fail or lose something, such as a capability
for something that every engine did. `CHANGES` has the remedies."""
CHANGES: Mapping[tuple[int, int], str] = {
    (0, 3): (
        "declare `dropout`, `aux_loss` and `resharding` where the engine drops, balances routers, or loads checkpoints "
        "of another layout: undeclared, these are refused now"
    )
}
"""The change of an engine's source that each version asks for."""

CONTRACT_PAGE = "docs/engine-reference.md"
"""Page with the contract of this version of the interface, for engine authors."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


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
    """The config class, a `TrainEngineConfig` or an `InferenceEngineConfig`."""
    capabilities: frozenset[Capability] = frozenset()
    description: str = ""
    conformance: str | None = None
    """The profile that the conformance suite runs, ``"module:PROFILE"``."""
    preload: tuple[str, ...] = ()
    """Modules that ranks on the driver's machine inherit in memory, imported once for the first group of a program.
    Their imports start no thread, run no kernel and do not touch CUDA."""

    packages: tuple[PackageVersions, ...] = ()
    """Packages of the backend: a version that fails is refused, and a version that was not tried warns once."""

    def supports(self, capability: Capability) -> bool:
        """True if the engine declares ``capability``."""
        return capability in self.capabilities


def check_spec(spec: object, origin: object, name: str | None = None) -> EngineSpec:
    """``spec`` itself if it is a valid `EngineSpec`, called ``name`` if given, that this core can drive.

    Raises:
        EngineBroken: with every malformed field.
        EngineIncompatible: the plugin was written for another version of the interface.
    """
    if not isinstance(spec, EngineSpec):
        raise EngineBroken(f"{origin}: expected an EngineSpec, found {spec!r} of type {type(spec).__name__}")
    if _is_version(spec.protocol):
        _check_protocol(spec, origin)
    raise_all(EngineBroken, origin, _violations(spec, name))
    return spec


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _is_version(protocol: object) -> bool:
    return isinstance(protocol, tuple) and len(protocol) == 2 and all(type(part) is int for part in protocol)


def _are_modules(names: object) -> bool:
    return isinstance(names, tuple) and all(type(name) is str for name in names)


def _check_protocol(spec: EngineSpec, origin: object) -> None:
    (major, minor), (core_major, core_minor) = spec.protocol, PROTOCOL_VERSION
    if major == core_major and (minor == core_minor or (major > 0 and minor < core_minor)):
        return
    fix = "upgrade core-rl"
    if spec.protocol < PROTOCOL_VERSION:
        changes = "".join(f"; {change}" for version, change in CHANGES.items() if version > spec.protocol)
        fix = f"upgrade the plugin ({CONTRACT_PAGE}){changes}; then set protocol={PROTOCOL_VERSION}"
    raise EngineIncompatible(
        f"{origin} was written for version {major}.{minor} of the engine interface; "
        f"this core-rl speaks {core_major}.{core_minor}; {fix}"
    )


def _violations(spec: EngineSpec, name: str | None) -> Iterator[str]:
    if name is not None and spec.name != name:
        yield f"the spec calls itself {spec.name!r}; name and entry point must be equal"
    if not _is_name(spec.name):
        yield f"name {spec.name!r} must be lower-case letters, digits and single hyphens, such as 'my-engine'"
    if spec.kind not in get_args(EngineKind):
        yield f"kind {spec.kind!r} must be 'train' or 'inference'"
    if not _is_version(spec.protocol):
        yield f"protocol {spec.protocol!r} must be two integers (major, minor)"
    for field in ("factory", "config", "conformance"):
        value = getattr(spec, field)
        optional = field == "conformance" and value is None
        if not optional and not is_reference(value):
            yield f"{field} {value!r} must be of the form 'module:attribute'"
    if not _are_modules(spec.preload):
        yield f"preload {spec.preload!r} must be a tuple of names of modules"
    yield from wrong_packages(spec.packages)
    if not isinstance(spec.capabilities, frozenset):
        yield f"capabilities must be a frozenset, found {type(spec.capabilities).__name__}"
    elif unknown := [c for c in spec.capabilities if type(c) is not Capability]:
        yield f"capabilities must be members of Capability, found {unknown!r}"
