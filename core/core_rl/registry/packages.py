"""`PackageVersions`: the versions of a package that an engine was tried with, and versions that fail a check."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import importlib_metadata as metadata
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from core_rl.errors import MissingPackage, UnsupportedPackage, raise_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FailingVersions:
    """Versions with which an engine fails a check of the conformance suite."""

    versions: str
    """A specifier of PEP 440, such as ``"==0.17.0"`` or ``"<0.16.1"``."""
    check: str
    """The name of the check, or the reason why no check runs."""


@dataclass(frozen=True, kw_only=True)
class PackageVersions:
    """A package that an engine needs, as `EngineSpec.packages` lists it."""

    name: str
    """The distribution, as pip writes it."""
    tried: str
    """The specifier of the versions that the conformance suite has passed with; others run with one warning."""
    failing: tuple[FailingVersions, ...] = ()
    """Versions that are refused."""

    @property
    def install(self) -> str:
        """The line that installs a version which was tried."""
        return f"pip install '{self.name}{self.tried}'"


TORCH = PackageVersions(name="torch", tried=">=2.11,!=2.12.*,<2.15")
TRANSFORMERS = PackageVersions(name="transformers", tried=">=5.13,<5.25")
"""Of every engine that builds on models of transformers."""


@functools.cache
def refuse_packages(engine: str, packages: tuple[PackageVersions, ...]) -> None:
    """Raise where a package of ``engine`` is missing, or has a version with which a check fails.

    Raises:
        MissingPackage: a package is not installed.
        UnsupportedPackage: a version is known to fail, with the check and the versions to take.
    """
    missing, failing = [], []
    for package in packages:
        version = _installed(package.name)
        if version is None:
            missing.append(f"{package.name} is not installed: {package.install}")
            continue
        failing += [
            f"{package.name} {version} is installed, which fails {known.check}: {package.install}"
            for known in package.failing
            if _matches(version, known.versions)
        ]
    raise_all(MissingPackage, f"engine {engine!r}", missing)
    raise_all(UnsupportedPackage, f"engine {engine!r}", failing)


@functools.cache
def warn_of_untried(engine: str, packages: tuple[PackageVersions, ...]) -> None:
    """Log a warning for each package of ``engine`` in a version that was not tried, once in a process."""
    for package in packages:
        version = _installed(package.name)
        if version is not None and not _matches(version, package.tried):
            logger.warning(
                "%s %s was not tried with the engine %r (tried: %s); pytest --engine=%s --pyargs core_rl_conformance "
                "--quick checks it",
                package.name,
                version,
                engine,
                package.tried,
                engine,
            )


def import_extra(module: str, need: str) -> Any:
    """The ``module``, whose first part is also the name of the extra of core-rl that installs it.

    Raises `MissingPackage` where it cannot be imported; ``need`` begins its message.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = module.partition(".")[0]
        raise MissingPackage(
            f"{need}, which cannot be imported ({error}); run: pip install 'core-rl[{extra}]'"
        ) from error


def wrong_packages(packages: object) -> Iterator[str]:
    """The violations of `EngineSpec.packages`."""
    if not (isinstance(packages, tuple) and all(isinstance(part, PackageVersions) for part in packages)):
        yield f"packages {packages!r} must be a tuple of PackageVersions"
        return
    for package in packages:
        for specifier in (package.tried, *(known.versions for known in package.failing)):
            try:
                SpecifierSet(specifier)
            except InvalidSpecifier:
                yield f"packages: {specifier!r} of {package.name!r} is no version specifier, such as '>=1.2,<2'"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _matches(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:  # a build from a checkout may be called anything
        return False
