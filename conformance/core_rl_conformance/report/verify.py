"""Verification of a report as a submission: complete, without contradictions, and of the installed suite."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from core_rl import __version__
from core_rl.errors import raise_all
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.files import ReportError
from core_rl_conformance.report.model import EngineRecord, Report

SHOWN = 8


def verify_reports(reports: Mapping[str, Report]) -> None:
    """Raise one `ReportError` with every reason why ``reports``, by file, prove less than they claim.

    `core_rl_conformance.report.files.read_report` has compared their digests.
    """
    problems = [f"{name}: {text}" for name, report in reports.items() for text in shortcomings(report)]
    raise_all(ReportError, "verification", problems, most=SHOWN)


def shortcomings(report: Report) -> list[str]:
    """Reasons why ``report`` proves less than it claims: with any, it is not listed and has no badge in colour."""
    return [
        *_of_suite(report),
        *_of_command(report),
        *(
            f"engine {engine.name!r}: {problem}"
            for engine in report.engines
            for problem in _of_engine(report, engine)
        ),
    ]


def _of_suite(report: Report) -> Iterator[str]:
    if report.suite_version != __version__:
        yield f"it is of core-rl {report.suite_version}, and {__version__} is installed; run the suite again"
        return
    kinds = {engine.kind for engine in report.engines}
    listed = {check.identifier for check in report.checks if check.kind in kinds}
    known = {name for name, check in load_checks().items() if check.kind in kinds}
    if missing := sorted(known - listed):
        yield f"it lacks checks of the suite: {', '.join(missing[:3])}"
    if unknown := sorted(listed - known):
        yield f"it lists checks that the suite does not have: {', '.join(unknown[:3])}"
    if not report.complete:
        session = "is quick and" if report.extent == "quick" else "left cases out, and"
        yield f"its command {session} proves a part alone: {report.command}; run the suite without filters"


def _of_command(report: Report) -> Iterator[str]:
    """A reader repeats the session with its command."""
    words = shlex.split(report.command)
    if not words or words[0] != "pytest":
        yield f"its command {report.command!r} does not run pytest"
        return
    for engine in report.engines:
        pairs = {f"{word}={after}" for word, after in zip(words, words[1:], strict=False)}
        option = "--trainer" if engine.kind == "trainer" else "--engine"
        by_address = engine.kind == "inference" and any(
            word.partition("=")[0] == "--server" for word in words
        )
        if not by_address and f"{option}={engine.name}" not in {*words, *pairs}:
            yield f"its command does not name the engine {engine.name!r}: {report.command}"


def _of_engine(report: Report, engine: EngineRecord) -> Iterator[str]:
    cases = report.cases(engine.name)
    packages: Mapping[str, str] = report.environment.packages
    # A trainer's version is that of the package under its adapter.
    if engine.kind != "trainer" and packages.get(engine.distribution, engine.version) != engine.version:
        yield f"it has version {engine.version}, and the environment {packages[engine.distribution]}"
    needs = needs_of(report.checks, engine.kind)
    ran = {case.check for case in cases}
    if absent := sorted(needs.keys() - ran):
        yield f"checks without a result: {', '.join(absent[:3])}"
    for case in cases:
        if case.outcome is Outcome.NOT_RUN:
            yield f"{case.check} on {case.place} was not run: {case.reason}"
        if problem := _contradiction(case):
            yield f"{case.check} on {case.place} {problem}"
    verdict = judge(cases, engine.problems, complete=report.complete)
    if engine.verdict is not verdict:
        yield f"its verdict is {str(engine.verdict)!r}, and its results give {str(verdict)!r}"
    declared = [capability.name for capability in engine.capabilities]
    # Compared as files have them: the meaning of a capability is computed when a report is shown.
    certified = [capability.model_dump() for capability in certify(declared, cases, needs)]
    if certified != [capability.model_dump() for capability in engine.capabilities]:
        yield "its capabilities do not follow from its results"


def _contradiction(case: CaseRecord) -> str:
    """The part of a result that its outcome denies; empty without one."""
    if case.outcome is Outcome.PASSED:
        if case.worst is not None and not case.worst.ratio <= 1:
            return f"passed with an error of {case.worst.error:.1e}, and {case.worst.limit:.1e} is allowed"
        if case.message:
            return "passed with the message of a failure"
    if case.outcome is Outcome.FAILED and not case.message:
        return "failed without a message"
    return ""
