"""The first version of a package with which a check has another outcome than with the version before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import importlib_metadata as metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from core_rl.errors import ConfigError
from core_rl.registry.engines import declared_engines
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.versions.environments import SuiteRun, available_versions, layer, run_suite

__all__ = [
    "SUITE",
    "Bisection",
    "Trial",
    "Verdict",
    "bisect",
    "engine_of",
    "span",
    "summary",
    "trial_of",
    "versions_between",
]

SUITE = ("--pyargs", "core_rl_conformance", "-p", "no:cacheprovider")
"""Arguments of pytest that name the suite wherever it is installed."""


class Verdict(StrEnum):
    """The answer of one version."""

    GOOD = "good"
    BAD = "bad"
    BROKEN = "broken"
    """No case of the check ran to an answer, for example because the engine cannot be imported."""
    UNTRIED = "untried"
    """It cannot be installed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One version, with the answer of the check."""

    version: str
    verdict: Verdict
    reason: str
    """The message of a failure, the comparison closest to its limit, or the end of the output."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Neighbouring versions with different answers; those between them are untried."""

    good: Trial
    bad: Trial
    between: tuple[str, ...] = ()


def span(good: str, bad: str) -> tuple[str, str, str]:
    """The package, the good and the bad version of two requirements ``PACKAGE==VERSION``.

    Raises `ConfigError` for anything else, and for two packages.
    """
    (package, first), (other, last) = _pinned("--good", good), _pinned("--bad", bad)
    if canonicalize_name(package) != canonicalize_name(other):
        raise ConfigError(f"--good is a version of {package}, and --bad of {other}; name one package")
    return package, first, last


def engine_of(package: str) -> str:
    """The one installed engine whose distribution requires ``package``.

    Raises `ConfigError` where none does, or several.
    """
    wanted = canonicalize_name(package)
    names = [
        entry.name
        for entry in declared_engines()
        if any(
            canonicalize_name(Requirement(line).name) == wanted
            for line in metadata.requires(entry.distribution) or ()
        )
    ]
    if len(names) != 1:
        listed = ", ".join(names) or "no installed engine"
        raise ConfigError(f"{listed} requires {package}; name one engine with --engine")
    return names[0]


def _pinned(option: str, requirement: str) -> tuple[str, str]:
    try:
        parsed = Requirement(requirement)
        (pin,) = parsed.specifier
        Version(pin.version)
    except (InvalidRequirement, InvalidVersion, ValueError):
        pin = None
    if pin is None or pin.operator != "==":
        raise ConfigError(f"{option} {requirement!r}: write one version as PACKAGE==VERSION")
    return parsed.name, pin.version


def versions_between(package: str, good: str, bad: str) -> list[str]:
    """The versions from ``good`` to ``bad``, both included, in that order; releases only, but for the two.

    Raises `ConfigError` where pip knows ``package`` not at all, or ``good`` is ``bad``.
    """
    ends = {Version(good): good, Version(bad): bad}
    if len(ends) < 2:
        raise ConfigError(f"--good and --bad are both {package}=={good}; name two versions")
    low, high = min(ends), max(ends)
    released = {Version(version): version for version in available_versions(package)}
    inner = {
        version: text
        for version, text in released.items()
        if low < version < high and not version.is_prerelease
    }
    ordered = sorted(ends | inner)
    return [(ends | inner)[version] for version in (ordered if Version(good) == low else ordered[::-1])]


def bisect(versions: Sequence[str], attempt: Callable[[str], Trial]) -> Bisection:
    """Search ``versions``, whose first is good and whose last is bad.

    A version without an answer leads to its neighbours; but where the last is broken, so may the searched one be.

    Raises `ConfigError` where the first is not good, or the last neither bad nor broken.
    """
    good, bad = attempt(versions[0]), attempt(versions[-1])
    failing = {Verdict.BAD, bad.verdict} & {Verdict.BAD, Verdict.BROKEN}
    for option, trial, expected in (("--good", good, {Verdict.GOOD}), ("--bad", bad, failing)):
        if trial.verdict not in expected:
            raise ConfigError(f"{option} {trial.version} is {trial.verdict}: {trial.reason}")
    low, high, untried = 0, len(versions) - 1, set[int]()
    while inner := [index for index in range(low + 1, high) if index not in untried]:
        middle = min(inner, key=lambda index: abs(2 * index - low - high))
        trial = attempt(versions[middle])
        if trial.verdict is Verdict.GOOD:
            low, good = middle, trial
        elif trial.verdict in failing:
            high, bad = middle, trial
        else:
            untried.add(middle)
    return Bisection(good=good, bad=bad, between=tuple(versions[low + 1 : high]))


def trial_of(package: str, version: str, arguments: Sequence[str], directory: Path) -> Trial:
    """Install ``package==version`` over this environment, in ``directory``, and run the suite with ``arguments``."""
    home = directory / f"{package}-{version}"
    python = layer(home, [f"{package}=={version}"])
    if python is None:
        return Trial(
            version=version, verdict=Verdict.UNTRIED, reason=f"pip cannot install {package}=={version}"
        )
    return _judged(version, run_suite(python, arguments, home / "report.json"))


def _judged(version: str, run: SuiteRun) -> Trial:
    cases = [case for case in run.report.results if case.outcome.executed] if run.report else []
    failures = [case for case in cases if case.outcome is Outcome.FAILED]
    if failures:
        return Trial(version=version, verdict=Verdict.BAD, reason=_first_line(failures[0]))
    if not cases:
        return Trial(version=version, verdict=Verdict.BROKEN, reason=_reason(run.tail))
    return Trial(version=version, verdict=Verdict.GOOD, reason=_closest(cases))


def _reason(tail: str) -> str:
    """The error with which pytest ended its session, else the last lines."""
    last = tail.rpartition("\n")[2]
    return last if last.startswith("ERROR") else tail


def _first_line(case: CaseRecord) -> str:
    return f"{case.check} on {case.place}: {case.message.partition(chr(10))[0]}"


def _closest(cases: Sequence[CaseRecord]) -> str:
    measured = [case.worst for case in cases if case.worst is not None]
    worst = max(measured, key=lambda measurement: measurement.ratio, default=None)
    limit = "" if worst is None else f", largest error {worst.error:.1e} of {worst.limit:.1e}"
    return f"{len(cases)} cases{limit}"


def summary(check: str, package: str, result: Bisection) -> str:
    """The result as lines for people."""
    good, bad = result.good, result.bad
    lines = [
        f"{check} passes with {package} {good.version} ({good.reason})",
        f"{check} fails with {package} {bad.version} ({bad.reason})",
    ]
    if result.between:
        lines.append(f"between them, not tried: {', '.join(result.between)}")
    return "\n".join(lines)
