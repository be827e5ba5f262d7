"""Rows that the suite measures already: figures from the committed reports of trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.report.files import read_report
from core_rl_conformance.report.model import EngineRecord, Report
from field.frameworks import FRAMEWORKS
from field.result import ROOT, Result, State, judged

RESUME, CUTS = "learning rate after resume", "losses and metrics at every cut"
DESCRIPTIONS = {
    RESUME: (
        "`T7.resume`: a run that is saved amid its schedule, built anew and loaded, next to a run that never "
        "stopped: the first learning rate that differs, in per cent. A rate that differs by more than rounding counts."
    ),
    CUTS: (
        "`T3.metrics` in float32: the loss and every metric of one batch as a whole, cut by 64 "
        "tokens, and cut into sequences: the largest difference of a metric, in per cent. "
        "`T2.entropy` adds the gradients of an entropy bonus, where they depend on the cut."
    ),
}
RATE = re.compile(r"the learning rate of step \d+ is (\S+); expected (\S+)$", re.MULTILINE)
METRIC = re.compile(r"the metric '(\S+)' is (\S+) of the whole batch, and (\S+) at ([^;]+);")
RATE_LIMIT, METRIC_LIMIT = 1e-4, 100 * math.sqrt(2.0**-23)
"""Per cent: the rounding that the checks allow in float32. A passed check gives no other figure."""


def results() -> list[Result]:
    """Both rows of every framework."""
    return [
        result
        for name, framework in FRAMEWORKS.items()
        for result in (_of_report(name, framework.report) if framework.report else _absent(name))
    ]


def _absent(name: str) -> Iterator[Result]:
    for row in (RESUME, CUTS):
        yield Result(
            row=row, case="-", framework=name, version="", state=State.NOT_RUN, reason="has no trainer here"
        )


def _of_report(name: str, file: str) -> Iterator[Result]:
    report = read_report(ROOT / "docs" / "results" / file)
    for engine in report.engines:
        version = engine.version.rpartition(" ")[2]
        named: dict[str, Any] = {"framework": name, "version": version, "command": report.command}
        yield Result(row=RESUME, case=engine.name, **named, **_resume(report, engine))
        yield Result(row=CUTS, case=engine.name, **named, **_cuts(report, engine))
        for case in _cases(report, engine, "T2.entropy"):
            # An entropy bonus that depends on the cut, which no metric shows.
            if case.outcome is not Outcome.PASSED and case.worst is not None:
                yield Result(
                    row=CUTS,
                    case=f"{engine.name}, entropy bonus",
                    **named,
                    state=judged(case.worst.error, case.worst.limit),
                    error=case.worst.error,
                    limit=case.worst.limit,
                    unit="in gradients",
                    reason=f"`T2.entropy`: {_waiver(case)}",
                )


def _cases(report: Report, engine: EngineRecord, check: str) -> Sequence[CaseRecord]:
    """Executed cases in float32; a waiver is a failure that is known."""
    return [
        case for case in report.cases(engine.name, check) if case.dtype == "float32" and case.outcome.executed
    ]


def _resume(report: Report, engine: EngineRecord) -> dict[str, Any]:
    cases = _cases(report, engine, "T7.resume")
    if not cases:
        return {"state": State.NOT_RUN, "reason": _why_not(report, engine, "T7.resume")}
    error = None
    for case in cases:
        if match := RATE.search(case.message):
            rate, expected = map(float, match.groups())
            error = max(error or 0.0, 100 * abs(rate / expected - 1))
        elif case.outcome is not Outcome.PASSED:
            return {"state": State.NOT_RUN, "reason": f"stopped before the rates: {_waiver(case)}"}
    return _figure(error, RATE_LIMIT, cases)


def _cuts(report: Report, engine: EngineRecord) -> dict[str, Any]:
    cases = _cases(report, engine, "T3.metrics")
    if not cases:
        return {"state": State.NOT_RUN, "reason": _why_not(report, engine, "T3.metrics")}
    differing = [
        (100 * abs(float(part) / float(whole) - 1), name)
        for case in cases
        for name, whole, part, _cut in METRIC.findall(case.message)
    ]
    if differing:
        error, name = max(differing)
        return _figure(error, METRIC_LIMIT, cases) | {"reason": f"`{name}`: {_waiver(cases[0])}"}
    return _figure(None, METRIC_LIMIT, cases)


def _figure(error: float | None, limit: float, cases: Sequence[CaseRecord]) -> dict[str, Any]:
    reasons = [_waiver(case) for case in cases if case.outcome is not Outcome.PASSED]
    return {
        "state": State.RIGHT if error is None else judged(error, limit),
        "error": error,
        "limit": limit,
        "unit": "%",
        "reason": next(iter(reasons), ""),
    }


def _waiver(case: CaseRecord) -> str:
    return case.reason.removeprefix("waived: ").partition(" (owner: ")[0]


def _why_not(report: Report, engine: EngineRecord, check: str) -> str:
    reasons = [case.reason for case in report.cases(engine.name, check)]
    return next(iter(reasons), "the report has no such case")
