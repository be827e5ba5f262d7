"""The code behind a report: a digest of a distribution's source files as this process imports them, and its commit."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import importlib_metadata as metadata

from core_rl.registry.spec import EngineSpec
from core_rl_conformance.report.model import CodeRecord

CODE = frozenset({".py", ".so", ".pyd", ".c", ".cc", ".cpp", ".h", ".cu", ".cuh"})
"""Suffixes of files that decide the results of an engine."""
TESTS = frozenset({"test", "tests"})
"""Directories next to the packages of a source tree that no wheel contains."""
SUITE = ("core_rl", "core_rl_conformance", "core_rl_oracle")


def engine_code(spec: EngineSpec, distribution: str) -> CodeRecord:
    """The code of the engine ``spec`` from ``distribution``, which need not be installed."""
    named = (spec.factory, spec.config, *([spec.conformance] if spec.conformance else ()))
    packages = {reference.partition(":")[0].partition(".")[0] for reference in named}
    try:
        installed = metadata.Distribution.from_name(distribution)
    except (metadata.PackageNotFoundError, ValueError):  # registered in this process
        return _code_of(packages)
    return _code_of(packages | _packages_of(installed), installed.read_text("direct_url.json"))


def suite_code() -> CodeRecord:
    """The code of this suite, with its oracle and the core below the engines."""
    return _code_of(SUITE)


def _packages_of(distribution: metadata.Distribution) -> set[str]:
    """Names of the top-level modules of ``distribution``, by its files or by the paths of an editable install."""
    files = [Path(str(file)) for file in distribution.files or ()]
    modules = {Path(file.parts[0]).stem for file in files if file.suffix in CODE}
    paths = [Path(str(distribution.locate_file(str(file)))) for file in files if file.suffix == ".pth"]
    lines = [line for path in paths if path.is_file() for line in path.read_text("utf-8").splitlines()]
    trees = [Path(line) for line in lines if line and Path(line).is_dir()]
    return {
        *modules,
        *(distribution.read_text("top_level.txt") or "").split(),
        *(child.stem for tree in trees for child in tree.iterdir() if next(_files_below(child), None)),
    } - TESTS


def _code_of(packages: Iterable[str], direct_url: str | None = None) -> CodeRecord:
    total, places = hashlib.sha256(), []
    for package in sorted(packages):
        for place in _places_of(package):
            places.append(place)
            for file in sorted(_files_below(place)):
                name = file.relative_to(place.parent).as_posix()
                total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    # The commit that an installer took from a repository goes before the checked-out one.
    installed = json.loads(direct_url or "{}").get("vcs_info", {}).get("commit_id", "")
    return CodeRecord(digest=total.hexdigest(), commit=installed or _commit_of(places))


def _places_of(package: str) -> list[Path]:
    """Directories or the file of ``package`` where an import takes it from."""
    try:
        module = find_spec(package)
    except ValueError:  # no spec, such as __main__
        module = None
    if module is None:
        return []
    return [Path(place) for place in module.submodule_search_locations or [module.origin or ""]]


def _files_below(place: Path) -> Iterator[Path]:
    files = place.rglob("*") if place.is_dir() else [place]
    return (file for file in files if file.suffix in CODE and file.is_file())


def _commit_of(places: Sequence[Path]) -> str:
    """The checked-out commit, with ``-dirty`` after changes; empty for files that no repository tracks."""
    for place in places:
        tracked = next(
            (file for file in sorted(_files_below(place)) if _git(file, "ls-files", file.name)), None
        )
        if tracked is not None:
            return _git(tracked, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return ""


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ""
