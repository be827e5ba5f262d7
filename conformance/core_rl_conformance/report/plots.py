"""The plots of a report: each check's errors in relation to their limits, and engine against oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core_rl.pages import Area, Chart, Dot, Tick
from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord
from core_rl_conformance.report.model import Report

__all__ = ["ErrorPlot", "ErrorRow", "Scatter", "error_plot", "scatter_plots"]

EXACT = 1.5
"""The position of errors of zero, in percent: a logarithmic axis has none."""
LEFT, RIGHT = 9.0, 98.0
"""The ends of the axis, in percent."""
DECADES = (-6, 3)
"""Ratios beyond these powers of ten stand at the ends of the axis."""
SCATTER_POINTS = 400
"""A plot has no more points that passed; they are taken evenly."""
SQUARE = Area(width=480, height=360, left=77, right=461, top=43, bottom=302)


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """The cases of one check, each at its largest error in relation to the limit."""

    check: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorPlot:
    """Error in relation to its limit, for all checks that measure."""

    rows: tuple[ErrorRow, ...]
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

    rows = [
        ErrorRow(
            check=check.identifier,
            dots=tuple(dot(case, worst) for case, worst in pairs if case.check == check.identifier),
        )
        for check in report.checks
    ]
    ticks = [
        Tick(at=EXACT, label="exact"),
        *(Tick(at=place(10.0**k), label=_power(k), minor=k not in (0, high)) for k in range(low, high + 1)),
    ]
    return ErrorPlot(rows=tuple(row for row in rows if row.dots), ticks=tuple(ticks), limit=place(1.0))


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
