"""A report as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from core_rl.pages import page_environment
from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord, Outcome
from core_rl_conformance.report.model import (
    CapabilityRecord,
    CapabilityState,
    CheckRecord,
    EngineRecord,
    Report,
)
from core_rl_conformance.report.plots import error_plot, scatter_plots

__all__ = ["CapabilityRow", "EngineView", "capability_rows", "count_outcomes", "render", "report_page"]

CODE = re.compile(r"`{1,2}([^`]+)`{1,2}")
TEMPLATES = Path(__file__).parent / "templates"
OUTCOMES = {
    Outcome.PASSED: "the engine agrees with the oracle",
    Outcome.FAILED: "it does not, or it raised an error",
    Outcome.NOT_SUPPORTED: "the engine does not declare a capability that the check needs",
    Outcome.WAIVED: "it failed as the engine's profile declares, with a reason and an owner",
    Outcome.NOT_RUN: "the environment or the command line left it out",
}


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """One engine with the number of its cases by outcome."""

    record: EngineRecord
    counts: dict[Outcome, int]

    @property
    def certified(self) -> int:
        """The number of its certified capabilities."""
        return [capability.state for capability in self.record.capabilities].count(CapabilityState.CERTIFIED)


@dataclass(frozen=True, kw_only=True)
class CheckView:
    """One check with its cases."""

    record: CheckRecord
    cases: Sequence[CaseRecord]
    counts: dict[Outcome, int]

    @property
    def worst(self) -> CaseRecord | None:
        """The case that came closest to its limit, or went furthest beyond it."""
        measured = [case for case in self.cases if case.worst is not None]
        return max(measured, key=lambda case: case.worst.ratio if case.worst else 0.0, default=None)


@dataclass(frozen=True, kw_only=True)
class CapabilityRow:
    """One capability with its state in each engine; None where the engine does not declare it."""

    name: str
    cells: Sequence[CapabilityRecord | None]


def report_page(report: Report) -> str:
    """The whole page."""
    values = {
        "report": report,
        "outcomes": OUTCOMES,
        "counts": count_outcomes(report.results),
        "engines": [
            EngineView(record=engine, counts=count_outcomes(report.cases(engine.name)))
            for engine in report.engines
        ],
        "capabilities": capability_rows(report.engines),
        "failures": [case for case in report.results if case.outcome is Outcome.FAILED],
        "waived": [case for case in report.results if case.outcome is Outcome.WAIVED],
        "checks": [_check_view(report, check) for check in report.checks],
        "plot": error_plot(report),
        "scatters": scatter_plots(report),
    }
    return render("report.html.jinja", values)


def render(template: str, values: Mapping[str, object]) -> str:
    """A template of this package with ``values``; text in them is escaped."""
    return _environment().get_template(template).render(values)


def _environment() -> jinja2.Environment:
    environment = page_environment(TEMPLATES)
    environment.filters |= {"measured": _measured, "number": _number, "prose": _prose, "slug": _slug}
    return environment


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"


def _measured(measurement: MeasurementRecord) -> str:
    if measurement.limit == 0:
        return "exact" if measurement.error == 0 else "not exact"
    return f"{_number(measurement.error)} / {_number(measurement.limit)}"


def _prose(text: str) -> Markup:
    """A docstring's text, with what stands between backquotes as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def _slug(value: str) -> str:
    return value.replace(" ", "-").replace(".", "-").lower()


def count_outcomes(cases: Sequence[CaseRecord]) -> dict[Outcome, int]:
    """The number of cases with each of the five outcomes."""
    return {outcome: sum(case.outcome is outcome for case in cases) for outcome in Outcome}


def capability_rows(engines: Sequence[EngineRecord]) -> list[CapabilityRow]:
    """Capabilities that any of ``engines`` declares."""
    declared = [{part.name: part for part in engine.capabilities} for engine in engines]
    names = sorted({name for group in declared for name in group})
    return [CapabilityRow(name=name, cells=[group.get(name) for group in declared]) for name in names]


def _check_view(report: Report, check: CheckRecord) -> CheckView:
    cases = report.cases(check=check.identifier)
    return CheckView(record=check, cases=cases, counts=count_outcomes(cases))
