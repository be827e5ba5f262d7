"""Entry points of installed distributions in the group ``rl_engines``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import importlib_metadata as metadata

from core_rl.config.capability import Capability
from core_rl.errors import EngineBroken, EngineError, EngineIncompatible, raise_all
from core_rl.registry.spec import PROTOCOL_VERSION, EngineKind, EngineSpec

__all__ = [
    "GROUP",
    "MIGRATION_PAGE",
    "EngineEntry",
    "check_spec",
    "declared_engines",
    "installable_engines",
    "load_object",
]

GROUP = "rl_engines"
"""The entry-point group that a plugin declares its engines in."""

MIGRATION_PAGE = "docs/engine-migration.md"
"""Changes between versions of the engine interface, and what an engine author does about them."""
_CORE = "core-rl"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One engine as a distribution declares it; exactly one of ``spec`` and ``error`` after reading."""

    name: str
    distribution: str
    version: str
    value: str
    """The entry point's value, ``"module:attribute"``."""
    path: str
    """The directory that the distribution is installed in."""
    spec: EngineSpec | None = None
    error: EngineError | None = None
    """The reason why the engine cannot be used; with an `EngineAmbiguous`, ``spec`` is set as well."""

    @property
    def origin(self) -> str:
        """The engine and its distribution, for messages."""
        return f"engine {self.name!r} of {self.distribution} {self.version} (entry point {self.value!r})"

    def read(self) -> EngineEntry:
        """The entry with its spec, or with the error that says why there is none."""
        if self.spec is not None or self.error is not None:
            return self
        try:
            found = load_object(self.value, self.origin)
            return replace(self, spec=check_spec(found, self.origin, self.name))
        except EngineError as error:
            return replace(self, error=error)


def declared_engines() -> Iterator[EngineEntry]:
    """Every entry point of the group, in the order of ``sys.path``. No plugin is imported.

    A distribution whose ``entry_points.txt`` cannot be parsed becomes one entry with an error under
    the distribution's own name, so that it hides neither itself nor the others.
    """
    seen: set[str] = set()
    for distribution in metadata.Distribution.discover():
        # The declarations are looked at first: a name costs the parsing of a whole METADATA file.
        entries = list(_entries_of(distribution))
        if not entries:
            continue
        # Python imports the first of two copies on sys.path; the second is not another claim.
        key = re.sub(r"[-_.]+", "-", entries[0].distribution).lower()
        if key not in seen:
            seen.add(key)
            yield from entries


def _entries_of(distribution: metadata.Distribution) -> Iterator[EngineEntry]:
    try:
        points = [point for point in distribution.entry_points if point.group == GROUP]
    except (TypeError, ValueError) as error:  # a line without "=", or not UTF-8
        name, version, path = _identity(distribution)
        broken = EngineBroken(f"{name} {version} ({path}): its entry_points.txt cannot be parsed: {error}")
        broken.__cause__ = error
        yield EngineEntry(name=name, distribution=name, version=version, value="", path=path, error=broken)
        return
    for point in points:
        name, version, path = _identity(distribution)
        yield EngineEntry(name=point.name, distribution=name, version=version, value=point.value, path=path)


def _identity(distribution: metadata.Distribution) -> tuple[str, str, str]:
    """Name, version and directory; damaged metadata must not hide the engine."""
    path = str(distribution.locate_file(""))
    try:
        return distribution.name, distribution.version, path
    except (FileNotFoundError, KeyError, TypeError):
        return f"(a distribution without METADATA in {path})", "(no version)", path


def load_object(reference: str, origin: object) -> object:
    """Import the object that ``reference`` (``"module:attribute"``) names; ``origin`` opens the messages.

    Raises:
        EngineBroken: with the original error chained; a missing dependency and a bug give different messages.
    """
    if not _REFERENCE.fullmatch(reference):
        raise EngineBroken(f"{origin}: {reference!r} is not of the form 'module:attribute'")
    module_name, attribute = reference.split(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute, _MISSING)
    except ModuleNotFoundError as error:
        raise EngineBroken(f"{origin}: {_missing_module(module_name, error)}") from error
    except (Exception, SystemExit) as error:  # foreign code: it may raise anything
        kind = type(error).__name__
        raise EngineBroken(f"{origin}: importing {module_name!r} raised {kind}: {error}") from error
    if found is _MISSING:
        raise EngineBroken(f"{origin}: module {module_name!r} has no attribute {attribute!r}")
    return found


def _missing_module(wanted: str, error: ModuleNotFoundError) -> str:
    if error.name is None or error.name.partition(".")[0] == wanted.partition(".")[0]:
        return f"the plugin is incomplete: {error}; reinstall it"
    return f"needs the module {error.name!r}, which is not installed; install the package that provides it"


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


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


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
    if not _matches(_NAME, spec.name):
        yield f"name {spec.name!r} must be lower-case letters, digits and single hyphens, such as 'my-engine'"
    if spec.kind not in get_args(EngineKind):
        yield f"kind {spec.kind!r} must be 'train' or 'inference'"
    if not _is_version(spec.protocol):
        yield f"protocol {spec.protocol!r} must be two integers (major, minor)"
    for field in ("factory", "config", "conformance"):
        value = getattr(spec, field)
        optional = field == "conformance" and value is None
        if not optional and not _matches(_REFERENCE, value):
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
