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
"""A plot has no more points that passed; they are taken evenly."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """Where the points of a scatter plot stand; around it are the axes."""

    left: float
    right: float
    top: float
    bottom: float


SQUARE = Area(left=16.0, right=96.0, top=12.0, bottom=84.0)


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
    """What one engine computed against what the oracle did: the values, and the differences."""

    title: str
    what: str
    """What is compared, for the axes."""
    values: tuple[Dot, ...]
    differences: tuple[Dot, ...]
    lowest: float
    highest: float
    largest_difference: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    difference_ticks: tuple[Tick, ...]
    area: Area = SQUARE


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
            kept = points.setdefault((case.engine, case.check, part.what), [])
            kept.extend(
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
        _scatter(f"{engine}, {check}: {what}", what, numbers[engine], kept)
        for (engine, check, what), kept in points.items()
        if kept
    ]


def _scatter(title: str, what: str, number: int, points: Sequence[_Point]) -> Scatter:
    both = [value for point in points for value in (point.engine, point.oracle)]
    lowest, highest = min(both), max(both)
    span = highest - lowest or 1.0
    largest = max(abs(point.engine - point.oracle) for point in points)

    def x(value: float) -> float:
        return SQUARE.left + (SQUARE.right - SQUARE.left) * (value - lowest) / span

    def y(share: float) -> float:
        return SQUARE.bottom - (SQUARE.bottom - SQUARE.top) * share

    def dot(point: _Point, share: float) -> Dot:
        label = f"{point.place}: engine {point.engine:.9g}, oracle {point.oracle:.9g}"
        return Dot(x=x(point.oracle), y=y(share), engine=number, failed=point.failed, label=label)

    shown = _evenly(points)
    middle = (lowest + highest) / 2
    marks = [lowest, middle, highest] if highest > lowest else [lowest]
    shares = (0.05, 0.5, 0.95)
    return Scatter(
        title=title,
        what=what,
        values=tuple(dot(point, (point.engine - lowest) / span) for point in shown),
        differences=tuple(
            dot(point, 0.5 + 0.45 * (point.engine - point.oracle) / (largest or 1.0)) for point in shown
        ),
        lowest=lowest,
        highest=highest,
        largest_difference=largest,
        x_ticks=tuple(Tick(at=x(value), label=f"{value:.3g}") for value in marks),
        y_ticks=tuple(Tick(at=y((value - lowest) / span), label=f"{value:.3g}") for value in marks),
        difference_ticks=tuple(
            Tick(at=y(share), label=label)
            for share, label in zip(shares, (f"-{largest:.1e}", "0", f"+{largest:.1e}"), strict=True)
        ),
    )


def _evenly(points: Sequence[_Point]) -> list[_Point]:
    """Some of many points; all that failed, up to the same number."""
    failed = [point for point in points if point.failed]
    passed = [point for point in points if not point.failed]
    return [part for own in (passed, failed) for part in own[:: math.ceil(len(own) / SCATTER_POINTS) or 1]]
