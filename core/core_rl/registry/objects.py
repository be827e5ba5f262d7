"""Objects by name: entry points of installed distributions, ``module:attribute`` and ``file.py:attribute``.

Importing this module imports no torch. Plugins are imported by `load_object` alone.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import importlib_metadata as metadata

from core_rl.errors import CoreRLError, EngineBroken

_REFERENCE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*|.+\.py):([^\W\d]\w*)")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """One entry point as a distribution declares it."""

    name: str
    distribution: str
    version: str
    value: str
    """``"module:attribute"``."""
    path: str
    """The directory that the distribution is installed in."""
    error: CoreRLError | None = None
    """The reason why the distribution's entry points cannot be read."""

    def described(self, kind: str) -> str:
        """``kind``, name and origin, for messages."""
        return f"{kind} {self.name!r} of {self.distribution} {self.version} (entry point {self.value!r})"


def declared_in(group: str) -> Iterator[EntryPoint]:
    """Every entry point of ``group``, in the order of ``sys.path``. No plugin is imported.

    A distribution whose ``entry_points.txt`` cannot be parsed becomes one entry with an error under
    the distribution's own name, so that it hides neither itself nor the others.
    """
    seen: set[str] = set()
    for distribution in metadata.Distribution.discover():
        # The declarations come first: a name costs the parsing of a whole METADATA file.
        points = list(_points_of(distribution, group))
        if not points:
            continue
        # Python imports the first of two copies on sys.path; the second is not another claim.
        key = re.sub(r"[-_.]+", "-", points[0].distribution).lower()
        if key not in seen:
            seen.add(key)
            yield from points


def _points_of(distribution: metadata.Distribution, group: str) -> Iterator[EntryPoint]:
    try:
        points = [point for point in distribution.entry_points if point.group == group]
    except (TypeError, ValueError) as error:  # a line without "=", or not UTF-8
        name, version, path = _identity(distribution)
        broken = EngineBroken(f"{name} {version} ({path}): its entry_points.txt cannot be parsed: {error}")
        broken.__cause__ = error
        yield EntryPoint(name=name, distribution=name, version=version, value="", path=path, error=broken)
        return
    for point in points:
        name, version, path = _identity(distribution)
        yield EntryPoint(name=point.name, distribution=name, version=version, value=point.value, path=path)


def _identity(distribution: metadata.Distribution) -> tuple[str, str, str]:
    """Name, version and directory; damaged metadata must not hide the entry point."""
    path = str(distribution.locate_file(""))
    try:
        return distribution.name, distribution.version, path
    except (FileNotFoundError, KeyError, TypeError):
        return f"(a distribution without METADATA in {path})", "(no version)", path


def load_entry_point(kind: str, claims: Sequence[EntryPoint], error: type[CoreRLError]) -> object:
    """Import the object of the one entry point in ``claims``, all of which have one name.

    Raises ``error`` that names the distributions when there are several, or the reason when it cannot be imported.
    """
    if len(claims) > 1:
        origins = " and ".join(f"{point.distribution} ({point.value!r})" for point in claims)
        raise error(f"{kind} {claims[0].name!r} is claimed by {origins}; uninstall either")
    if claims[0].error is not None:
        raise error(str(claims[0].error)) from claims[0].error
    return load_object(claims[0].value, claims[0].described(kind), error)


def is_reference(value: object) -> bool:
    """Return whether ``value`` is of the form ``module:attribute`` or ``file.py:attribute``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def load_object(reference: str, origin: object, error: type[CoreRLError] = EngineBroken) -> object:
    """Import the object that ``reference`` names; ``origin`` opens the messages.

    ``reference`` is ``"module:attribute"`` or ``"path/file.py:attribute"``. Raises ``error`` with the original
    exception chained; the message distinguishes a missing dependency from a bug.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise error(
            f"{origin}: {reference!r} is not of the form 'module:attribute' or 'path/file.py:attribute'"
        )
    name, attribute = match.groups()
    try:
        module = _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise error(f"{origin}: {_missing_module(name, missing)}") from missing
    except (Exception, SystemExit) as raised:  # foreign code: it may raise anything
        raise error(f"{origin}: importing {name!r} raised {type(raised).__name__}: {raised}") from raised
    target = getattr(module, attribute, _MISSING)
    if target is _MISSING:
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise error(f"{origin}: module {name!r} has no attribute {attribute!r}{hint}")
    return target


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # Known by name, as an import would leave it: dataclasses and pickle look their module up.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _missing_module(module: str, error: ModuleNotFoundError) -> str:
    absent = error.name or ""
    if f"{module}.".startswith(f"{absent}."):
        return f"there is no module {absent!r}"
    if absent.partition(".")[0] == module.partition(".")[0]:
        return f"the package of {module!r} is incomplete: {error}; reinstall it"
    directory = Path(module).resolve().parent
    if module.endswith(".py") and [*directory.glob(absent), *directory.glob(f"{absent}.py")]:
        return f"needs the module {absent!r} beside it; add its directory to PYTHONPATH: {directory}"
    return f"needs the module {absent!r}, which is not installed; install the package that provides it"
