"""Entry points of installed distributions in the group ``rl_engines``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import importlib_metadata as metadata

from core_rl.config.capability import Capability
from core_rl.errors import EngineBroken, EngineError, EngineIncompatible, raise_all
from core_rl.registry.objects import EntryPoint, declared_in, is_reference, load_object
from core_rl.registry.spec import PROTOCOL_VERSION, EngineKind, EngineSpec

__all__ = [
    "GROUP",
    "MIGRATION_PAGE",
    "EngineEntry",
    "check_spec",
    "declared_engines",
    "installable_engines",
]

GROUP = "rl_engines"
"""The entry-point group that a plugin declares its engines in."""

MIGRATION_PAGE = "docs/engine-migration.md"
"""Changes between versions of the engine interface, and what an engine author does about them."""
_CORE = "core-rl"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class EngineEntry(EntryPoint):
    """One engine as a distribution declares it; exactly one of ``spec`` and ``error`` after reading.

    ``spec`` is kept next to an `EngineAmbiguous`.
    """

    spec: EngineSpec | None = None

    @property
    def origin(self) -> str:
        """Name and distribution of the engine, for messages."""
        return self.described("engine")

    def read(self) -> EngineEntry:
        """The entry with its spec, or with the error that explains why there is none."""
        if self.spec is not None or self.error is not None:
            return self
        try:
            found = load_object(self.value, self.origin)
            return replace(self, spec=check_spec(found, self.origin, self.name))
        except EngineError as error:
            return replace(self, error=error)


def declared_engines() -> Iterator[EngineEntry]:
    """Every engine that an installed distribution declares; see `declared_in`. No plugin is imported."""
    for point in declared_in(GROUP):
        yield EngineEntry(**vars(point))


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


def _check_protocol(spec: EngineSpec, origin: object) -> None:
    (major, minor), (core_major, core_minor) = spec.protocol, PROTOCOL_VERSION
    if major == core_major and (minor == core_minor or (major > 0 and minor < core_minor)):
        return
    fix = f"upgrade {_CORE}" if spec.protocol > PROTOCOL_VERSION else f"upgrade the plugin ({MIGRATION_PAGE})"
    raise EngineIncompatible(
        f"{origin} was written for version {major}.{minor} of the engine interface; "
        f"this {_CORE} speaks {core_major}.{core_minor}; {fix}"
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
    if not isinstance(spec.capabilities, frozenset):
        yield f"capabilities must be a frozenset, found {type(spec.capabilities).__name__}"
    elif unknown := [c for c in spec.capabilities if type(c) is not Capability]:
        yield f"capabilities must be members of Capability, found {unknown!r}"


def installable_engines() -> list[str]:
    """Engines that an extra of core-rl installs: each extra ``X`` that requires ``core-rl-X``."""
    try:
        requirements = metadata.requires(_CORE) or []
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return []
    pattern = re.compile(rf"{_CORE}-([a-z0-9-]+)\b.*;.*\bextra == ['\"]\1['\"]")
    return sorted(match[1] for line in requirements if (match := pattern.match(line)))
