"""A report as one HTML page with its plots, without network or scripts, and the badge of an engine."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from markupsafe import Markup, escape

from core_rl.errors import ConfigError
from core_rl.pages import Area, Chart, Dot, Tick, page_environment
from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord, Outcome, worst_of
from core_rl_conformance.report.certify import lacking
from core_rl_conformance.report.model import CapabilityRecord, EngineRecord, Report
from core_rl_conformance.report.verify import shortcomings

EXACT = 1.5
"""The position of errors of zero, in percent: a logarithmic axis has none."""
LEFT, RIGHT = 9.0, 98.0
"""The ends of the axis, in percent."""
DECADES = (-6, 3)
"""Ratios beyond these powers of ten stand at the ends of the axis."""
SCATTER_POINTS = 400
"""A plot has no more points that passed; they are taken evenly."""
SQUARE = Area(width=480, height=360, left=77, right=461, top=43, bottom=302)
FRESH_FOR = timedelta(days=30)
"""After this a badge is grey: versions have moved on."""
COLORS = {True: "#2e7d32", False: "#c62828", None: "#757575"}
WIDTH_OF_LETTER = 6.6
"""Pixels, on average, of the font of a badge."""
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
class ErrorPlot:
    """Error in relation to its limit, for all checks that measure."""

    rows: Mapping[str, Sequence[Dot]]
    """The cases of each check, each at its largest error in relation to the limit."""
    ticks: tuple[Tick, ...]
    limit: float
    """Value at which error and limit are equal."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """The values of one engine against the oracle's, and the differences."""

    title: str
    values: Chart
    differences: Chart


def error_plot(report: Report) -> ErrorPlot:
    """Every executed case that measured something, at its worst measurement."""
    numbers = _numbers(report)
    measured = [(case, case.worst) for case in report.results if case.outcome.executed]
    pairs = [(case, worst) for case, worst in measured if worst is not None]
    low, high = _decades(worst.ratio for _, worst in pairs)

    def place(ratio: float) -> float:
        if ratio == 0:
            return EXACT
        power = min(max(math.log10(ratio), low), high) if math.isfinite(ratio) else high
        return LEFT + (RIGHT - LEFT) * (power - low) / (high - low)

    def dot(case: CaseRecord, worst: MeasurementRecord) -> Dot:
        error = f"error {worst.error:.2e}, limit {worst.limit:.2e}"
        return Dot(
            x=place(worst.ratio),
            y=50.0,
            number=numbers[case.engine],
            failed=not worst.ratio <= 1,
            label=f"{case.engine} {case.place}: {case.outcome}; {worst.what}: {error}",
        )

    rows = {
        check.identifier: [dot(case, worst) for case, worst in pairs if case.check == check.identifier]
        for check in report.checks
    }
    ticks = [
        Tick(at=EXACT, label="exact"),
        *(Tick(at=place(10.0**k), label=_power(k), minor=k not in (0, high)) for k in range(low, high + 1)),
    ]
    return ErrorPlot(
        rows={check: dots for check, dots in rows.items() if dots}, ticks=tuple(ticks), limit=place(1.0)
    )


def _numbers(report: Report) -> dict[str, int]:
    return {engine.name: number for number, engine in enumerate(report.engines)}


def _decades(ratios: Iterable[float]) -> tuple[int, int]:
    """Whole powers of ten around all ratios; one below the limit and one above at least."""
    powers = [math.log10(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    low = math.floor(min(powers, default=-1.0))
    high = math.ceil(max(powers, default=1.0))
    return max(min(low, -1), DECADES[0]), min(max(high, 1), DECADES[1])


def _power(exponent: int) -> str:
    digits = str(abs(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1 = limit" if exponent == 0 else f"10{'⁻' if exponent < 0 else ''}{digits}"


@dataclass(frozen=True, kw_only=True)
class _Point:
    engine: float
    oracle: float
    place: str
    failed: bool


def scatter_plots(report: Report) -> list[Scatter]:
    """One for each engine and kind of comparison that kept points."""
    points: dict[tuple[str, str, str], list[_Point]] = {}
    for case in report.results:
        for part in case.measurements:
            pairs = points.setdefault((case.engine, case.check, part.what), [])
            pairs.extend(
                _Point(
                    engine=engine,
                    oracle=oracle,
                    place=case.place,
                    failed=not abs(engine - oracle) <= part.limit,
                )
                for engine, oracle in part.points
                if math.isfinite(engine) and math.isfinite(oracle)
            )
    numbers = _numbers(report)
    return [
        _scatter(f"{engine}, {check}: {label}", label, numbers[engine], pairs)
        for (engine, check, label), pairs in points.items()
        if pairs
    ]


def _scatter(title: str, quantity: str, number: int, points: Sequence[_Point]) -> Scatter:
    both = [value for point in points for value in (point.engine, point.oracle)]
    lowest, highest = min(both), max(both)
    span = highest - lowest or 1.0
    largest = max(abs(point.engine - point.oracle) for point in points)
    middle = (lowest + highest) / 2
    marks = [
        ((value - lowest) / span, f"{value:.3g}")
        for value in (lowest, middle, highest)[: 3 if highest > lowest else 1]
    ]
    shown = _evenly(points)

    def chart(
        kind: str, up: list[tuple[float, str]], shares: Iterable[float], ends: tuple[float, float]
    ) -> Chart:
        return Chart(
            title=f"{title}: {kind}",
            dots=tuple(
                Dot(
                    x=SQUARE.x((point.oracle - lowest) / span),
                    y=SQUARE.y(share),
                    number=number,
                    failed=point.failed,
                    label=f"{point.place}: engine {point.engine:.9g}, oracle {point.oracle:.9g}",
                )
                for point, share in zip(shown, shares, strict=True)
            ),
            x_ticks=tuple(Tick(at=SQUARE.x(share), label=label) for share, label in marks),
            y_ticks=tuple(Tick(at=SQUARE.y(share), label=label) for share, label in up),
            guide=f"{SQUARE.left},{SQUARE.y(ends[0])} {SQUARE.right},{SQUARE.y(ends[1])}",
            x_label=f"{quantity}, oracle",
            y_label=f"{quantity}, engine" if kind == "values" else "engine - oracle",
            area=SQUARE,
        )

    values = [(point.engine - lowest) / span for point in shown]
    differences = [0.5 + 0.45 * (point.engine - point.oracle) / (largest or 1.0) for point in shown]
    around = [(0.05, f"-{largest:.1e}"), (0.5, "0"), (0.95, f"+{largest:.1e}")]
    return Scatter(
        title=title,
        values=chart("values", marks, values, (0.0, 1.0)),
        differences=chart("differences", around, differences, (0.5, 0.5)),
    )


def _evenly(points: Sequence[_Point]) -> list[_Point]:
    """Some of many points; all that failed, up to the same number."""
    failed = [point for point in points if point.failed]
    passed = [point for point in points if not point.failed]
    return [
        part for group in (passed, failed) for part in group[:: math.ceil(len(group) / SCATTER_POINTS) or 1]
    ]


def report_page(report: Report) -> str:
    """The whole page."""
    values = {
        "report": report,
        "outcomes": OUTCOMES,
        "capabilities": capability_rows(report.engines),
        "plot": error_plot(report),
        "scatters": scatter_plots(report),
    }
    return render("report.html.jinja", values)


def render(template: str, values: Mapping[str, object]) -> str:
    """A template of this package with ``values``; text in them is escaped."""
    environment = page_environment(TEMPLATES)
    environment.filters |= {
        "closest": worst_of,
        "counts": count_outcomes,
        "measured": _measured,
        "number": _number,
        "prose": lambda text: Markup(CODE.sub(r"<code>\1</code>", str(escape(text)))),
        "slug": lambda value: value.replace(" ", "-").replace(".", "-").lower(),
    }
    return environment.get_template(template).render(values)


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"


def _measured(measurement: MeasurementRecord) -> str:
    if measurement.limit == 0:
        return "exact" if measurement.error == 0 else "not exact"
    return f"{_number(measurement.error)} / {_number(measurement.limit)}"


def count_outcomes(cases: Iterable[CaseRecord]) -> dict[Outcome, int]:
    """The number of cases with each of the five outcomes."""
    counts = Counter(case.outcome for case in cases)
    return {outcome: counts[outcome] for outcome in Outcome}


def capability_rows(engines: Sequence[EngineRecord]) -> dict[str, list[CapabilityRecord | None]]:
    """Capabilities that any of ``engines`` declares, with the state in each; None where one does not declare it."""
    declared = [{part.name: part for part in engine.capabilities} for engine in engines]
    names = sorted({name for group in declared for name in group})
    return {name: [group.get(name) for group in declared] for name in names}


def badge(report: Report, engine: EngineRecord, profile: str, now: datetime) -> str:
    """An SVG image with the state of ``profile``, the version and the date.

    Grey where ``report`` is 30 days old, or does not verify. Raises what `lacking` raises.
    """
    certified = not lacking(engine, profile)
    unverified = bool(shortcomings(report))
    old = now - report.created > FRESH_FOR
    label = f"core-rl {profile}"
    words = "not verified" if unverified else "certified" if certified else "not certified"
    value = f"{words} {engine.version}, {report.created.date().isoformat()}"
    left, right = (round(WIDTH_OF_LETTER * len(text)) + 12 for text in (label, value))
    color = COLORS[None if old or unverified else certified]
    values = {"label": label, "value": value, "left": left, "right": right, "color": color}
    return render("badge.svg.jinja", values)


def badge_of(reports: Sequence[Report], profile: str) -> str:
    """The badge of today for the one engine of one report. Raises `ConfigError` for more, and what `lacking` raises."""
    engines = [(report, engine) for report in reports for engine in report.engines]
    if len(engines) != 1:
        names = ", ".join(engine.name for _, engine in engines)
        raise ConfigError(
            f"--badge is of one engine, and the reports have {names}; name a report of one engine"
        )
    return badge(*engines[0], profile, datetime.now(UTC))
