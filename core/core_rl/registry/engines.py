"""Engines by name: installed plugins, and registrations of this process."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeVar

import importlib_metadata as metadata

from core_rl.errors import EngineAmbiguous, EngineBroken, EngineError, EngineNotFound
from core_rl.registry.objects import EntryPoint, declared_in, load_object
from core_rl.registry.spec import EngineSpec, check_spec

if TYPE_CHECKING:
    from core_rl.config.engine import EngineConfig

GROUP = "rl_engines"
"""The entry-point group that a plugin declares its engines in."""
_CORE = "core-rl"

# The one state of core-rl that belongs to the whole process: the calls of `register_engine`.
_registered: list[Registration] = []

_Class = TypeVar("_Class")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineEntry(EntryPoint):
    """One engine as a distribution declares it; after reading, either ``spec`` or ``error`` is set.

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
            spec = load_object(self.value, self.origin)
            return dataclasses.replace(self, spec=check_spec(spec, self.origin, self.name))
        except EngineError as error:
            return dataclasses.replace(self, error=error)


def declared_engines() -> Iterator[EngineEntry]:
    """Every engine that an installed distribution declares; see `declared_in`. No plugin is imported."""
    for point in declared_in(GROUP):
        yield EngineEntry(**vars(point))


def list_engines() -> list[EngineEntry]:
    """All engines in alphabetical order; an unusable engine carries its error, and hides no other."""
    entries = _claims()
    counts = Counter(entry.name for entry in entries)
    read = [entry.read() for entry in sorted(entries, key=attrgetter("name", "distribution"))]
    return [
        dataclasses.replace(entry, error=_ambiguous(entry.name, entries)) if counts[entry.name] > 1 else entry
        for entry in read
    ]


def engine_names() -> list[str]:
    """Names of all installed, registered and installable engines."""
    return sorted({*(entry.name for entry in _claims()), *installable_engines()})


def get_spec(name: str) -> EngineSpec:
    """The spec of the engine ``name``. Imports the module of that spec, and of no other.

    Raises:
        EngineNotFound: with the known names, the closest one, and the line that installs a missing one.
        EngineAmbiguous: two distributions claim the name.
        EngineBroken: the plugin cannot be imported, or its spec is malformed.
        EngineIncompatible: the plugin was written for another version of the interface.
    """
    entries = _claims()
    claims = [entry for entry in entries if entry.name == name]
    if not claims:
        raise _not_found(name, entries)
    if len(claims) > 1:
        raise _ambiguous(name, claims)
    entry = claims[0].read()
    if entry.error is not None:
        raise entry.error
    assert entry.spec is not None
    return entry.spec


def load_config(engine: EngineSpec | str) -> type[EngineConfig]:
    """Import the config class of an engine, given by its spec or by its name.

    Raises:
        EngineNotFound, EngineAmbiguous: no engine has the name, or several; see `get_spec`.
        EngineBroken: the class cannot be imported, or is no `TrainEngineConfig` or `InferenceEngineConfig`.
        EngineIncompatible: before anything is imported.
    """
    from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig  # pydantic

    spec = get_spec(engine) if isinstance(engine, str) else engine
    base = TrainEngineConfig if spec.kind == "train" else InferenceEngineConfig
    return load_class(spec, "config", base)


def load_class(spec: EngineSpec, field: Literal["config", "factory"], base: type[_Class]) -> type[_Class]:
    """Import the class that a ``field`` of ``spec`` names, a subclass of ``base``.

    Raises:
        EngineBroken: it cannot be imported, or is no subclass of ``base``.
        EngineIncompatible: before anything is imported.
    """
    origin = _Origin(spec)
    check_spec(spec, origin)
    target = spec.config if field == "config" else spec.factory
    loaded = load_object(target, origin)
    if isinstance(loaded, type) and issubclass(loaded, base):
        return loaded
    raise EngineBroken(
        f"{origin}: {field} {target!r} must be a subclass of {base.__module__}.{base.__name__}, found {loaded!r}"
    )


class Registration(AbstractContextManager["Registration"]):
    """An engine registered in this process; `close`, or leaving the ``with`` block, undoes it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        _registered.append(self)

    def close(self) -> None:
        """Unregister the engine; a replaced engine is used again. Further calls do nothing."""
        if self in _registered:
            _registered.remove(self)

    def __exit__(self, *_: object) -> None:
        self.close()


def register_engine(spec: EngineSpec, *, replace: bool = False) -> Registration:
    """Make ``spec`` known in this process, as an installed plugin would be; for tests and notebooks.

    Other processes do not see it; ranks get the spec and not its name.

    Raises:
        EngineAmbiguous: the name is taken and ``replace`` is false.
        EngineBroken: the spec is malformed.
        EngineIncompatible: it was written for another version of the interface.
    """
    check_spec(spec, "register_engine")
    taken = [entry for entry in _claims() if entry.name == spec.name]
    if taken and not replace:
        raise EngineAmbiguous(
            f"engine {spec.name!r} exists already:\n{_listed(taken)}\n"
            "Choose another name, or pass replace=True to replace it"
        )
    return Registration(spec)


def _claims() -> list[EngineEntry]:
    """Unread entries; a registered engine replaces all earlier engines of its name."""
    registered = {
        registration.spec.name: EngineEntry(
            name=registration.spec.name,
            distribution="(this process)",
            version="-",
            value=registration.spec.factory,
            path="-",
            spec=registration.spec,
        )
        for registration in _registered
    }
    return [*registered.values(), *(entry for entry in declared_engines() if entry.name not in registered)]


class _Origin:
    """The distribution that declares ``spec``, looked up by `str`: it reads all that is installed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._name = spec.name

    def __str__(self) -> str:
        origins = [entry.origin for entry in _claims() if entry.name == self._name]
        return origins[0] if len(origins) == 1 else f"engine {self._name!r}"


def _listed(entries: list[EngineEntry]) -> str:
    return "\n".join(f"  - {e.distribution} {e.version} in {e.path}, {e.value!r}" for e in entries)


def _ambiguous(name: str, entries: list[EngineEntry]) -> EngineAmbiguous:
    claims = [entry for entry in entries if entry.name == name]
    return EngineAmbiguous(
        f"engine {name!r} is claimed {len(claims)} times:\n{_listed(claims)}\n"
        f"Uninstall all but one: pip uninstall {claims[-1].distribution}"
    )


def _not_found(name: str, entries: list[EngineEntry]) -> EngineNotFound:
    known = sorted(entry.name for entry in entries)
    installable = installable_engines()
    close = difflib.get_close_matches(name.lower(), [*known, *installable], n=1)
    lines = [f"no installed engine is called {name!r}. Installed: {', '.join(known) or 'none'}."]
    if name in installable:
        lines.append(f'Install it: pip install "core-rl[{name}]"')
    elif close:
        hint = "" if close[0] in known else f' Install it: pip install "core-rl[{close[0]}]"'
        lines.append(f"Did you mean {close[0]!r}?{hint}")
    else:
        offered = ", ".join(f'"core-rl[{extra}]"' for extra in installable)
        lines.append(
            f"Install the distribution that declares it under the entry point 'rl_engines'. core-rl's own: {offered}"
        )
    lines += [f"Unreadable: {entry.error}" for entry in entries if entry.error is not None]
    return EngineNotFound("\n".join(lines))


def installable_engines() -> list[str]:
    """Engines that an extra of core-rl installs: each extra ``X`` that requires ``core-rl-X``, but ``cluster``."""
    try:
        requirements = metadata.requires(_CORE) or []
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return []
    pattern = re.compile(rf"{_CORE}-(?!cluster\b)([a-z0-9-]+)\b.*;.*\bextra == ['\"]\1['\"]")
    return sorted(match[1] for line in requirements if (match := pattern.match(line)))
