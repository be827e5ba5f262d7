"""The geometry of the plots: positions in percent of the drawing, ready for a template to write as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core_rl_conformance.report.model import CaseRecord, MeasurementRecord, Report

__all__ = ["Dot", "ErrorPlot", "ErrorRow", "Scatter", "Tick", "error_plot", "scatter_plots"]

EXACT = 1.5
"""Where errors of zero stand, which a logarithmic axis has no place for."""
LEFT, RIGHT = 9.0, 98.0
"""The ends of the axis."""
DECADES = (-6, 3)
"""Ratios beyond these powers of ten stand at the ends of the axis."""
SCATTER_POINTS = 400
"""A page has no more points for each engine in one plot; they are taken evenly."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One point."""

    x: float
    y: float
    engine: int
    """The engine's number in the report: its colour."""
    failed: bool
    label: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str
    minor: bool = False
    """Left out where there is little room."""


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
    """Where error and limit are equal."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """What engines computed against what the oracle did: the values, and the differences."""

    title: str
    values: tuple[Dot, ...]
    differences: tuple[Dot, ...]
    lowest: float
    highest: float
    largest_difference: float


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
            engine=numbers[case.engine],
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


def scatter_plots(report: Report) -> list[Scatter]:
    """One for each kind of comparison that kept points."""
    numbers = _numbers(report)
    points: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for case in report.results:
        for measurement in case.measurements:
            kept = points.setdefault((case.check, measurement.what), [])
            kept.extend(
                (numbers[case.engine], *pair) for pair in measurement.points if all(map(math.isfinite, pair))
            )
    return [_scatter(f"{check}: {what}", kept) for (check, what), kept in points.items() if kept]


def _scatter(title: str, points: Sequence[tuple[int, float, float]]) -> Scatter:
    both = [value for _, engine, oracle in points for value in (engine, oracle)]
    lowest, highest = min(both), max(both)
    span = highest - lowest or 1.0
    largest = max(abs(engine - oracle) for _, engine, oracle in points)
    scale = largest or 1.0

    def dot(point: tuple[int, float, float], *, difference: bool) -> Dot:
        number, engine, oracle = point
        y = 50 - 45 * (engine - oracle) / scale if difference else 95 - 90 * (engine - lowest) / span
        label = f"engine {engine:.9g}, oracle {oracle:.9g}"
        return Dot(x=5 + 90 * (oracle - lowest) / span, y=y, engine=number, failed=False, label=label)

    shown = [point for number in sorted({n for n, *_ in points}) for point in _evenly(points, number)]
    return Scatter(
        title=title,
        values=tuple(dot(point, difference=False) for point in shown),
        differences=tuple(dot(point, difference=True) for point in shown),
        lowest=lowest,
        highest=highest,
        largest_difference=largest,
    )


def _evenly(points: Sequence[tuple[int, float, float]], engine: int) -> list[tuple[int, float, float]]:
    own = [point for point in points if point[0] == engine]
    return own[:: math.ceil(len(own) / SCATTER_POINTS)]
