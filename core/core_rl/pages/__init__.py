"""Environment of HTML pages, and the geometry of charts as SVG.

``chart.html.jinja`` draws charts inside a page, `svg_document` as a file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

SHARED = Path(__file__).parent
POINTS = 240
"""The most points of a curve: several values are drawn as their mean, inside the band of all of them."""
FEW = 40
"""The most values of a curve that each get a dot."""
FLAT = 1e-5
"""Values that differ by a smaller share of them are a constant, whose differences are rounding."""
LARGEST = 1e300
"""Larger values are drawn at this one."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """The rectangle between the axes, in a drawing of ``width`` by ``height``; y grows downwards."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    def x(self, share: float) -> float:
        """The position of ``share`` of the horizontal axis, from the left."""
        return round(self.left + (self.right - self.left) * share, 1)

    def y(self, share: float) -> float:
        """The position of ``share`` of the vertical axis, from the bottom."""
        return round(self.bottom - (self.bottom - self.top) * share, 1)


WIDE = Area(width=480, height=230, left=70, right=472, top=10, bottom=206)


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str
    minor: bool = False
    """Left out where there is little room."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One point of a scatter plot."""

    x: float
    y: float
    number: int
    """The number of its series: the colour."""
    failed: bool
    label: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One series of a line chart; ``line`` and ``band`` are lists of points as SVG writes them."""

    name: str
    number: int
    """Number of the curve in the chart: the colour."""
    line: str
    band: str
    dots: tuple[tuple[float, float], ...]
    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Axes with curves or dots between them."""

    title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...] = ()
    dots: tuple[Dot, ...] = ()
    guide: str = ""
    """A line to compare with, as a list of points."""
    x_label: str = ""
    y_label: str = ""
    area: Area = WIDE


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float | None]]], last: float) -> Chart:
    """The curves of ``series``, each a sequence of (step, value), over the steps 0 to ``last``.

    A constant is a line in the middle, with its value on the axis. The legend counts values that are not finite, which
    are not drawn.
    """
    area, finite = WIDE, {name: _finite(points) for name, points in series.items()}
    values = [value for points in finite.values() for _, value in points] or [0.0]
    low, high = min(values), max(values)
    is_flat = high - low <= max(FLAT * max(abs(low), abs(high)), sys.float_info.min)
    y_marks = [low] if is_flat else _round_marks(low, high)
    low, height = y_marks[0], y_marks[-1] - y_marks[0]

    def place(step: float, value: float) -> tuple[float, float]:
        return area.x(step / (last or 1.0)), area.y(0.5 if is_flat else (value - low) / height)

    def curve(number: int, name: str) -> Curve:
        points = finite[name]
        unseen = len(series[name]) - len(points)
        parts = list(_buckets(points))
        places = [place(step, mean) for step, mean, _, _ in parts]
        upper = [place(step, most) for step, _, _, most in parts]
        lower = [place(step, least) for step, _, least, _ in parts]
        return Curve(
            name=name,
            number=number,
            line=_points(places),
            band=_points(upper + lower[::-1]) if len(parts) < len(points) else "",
            dots=tuple(places) if len(points) <= FEW else (),
            first=f"{points[0][1]:.4g}" if points else "-",
            last=(f"{points[-1][1]:.4g}" if points else "-")
            + (f" (not finite {unseen} of {len(series[name])} times)" if unseen else ""),
        )

    x_marks = [mark for mark in _round_marks(0.0, last, whole=True) if mark <= last]
    return Chart(
        title=title,
        curves=tuple(curve(number, name) for number, name in enumerate(series)),
        x_ticks=tuple(Tick(at=area.x(mark / (last or 1.0)), label=f"{mark:g}") for mark in x_marks),
        y_ticks=tuple(Tick(at=place(0.0, mark)[1], label=f"{mark:.7g}") for mark in y_marks),
    )


def page_environment(*directories: Path) -> jinja2.Environment:
    """The environment of the templates in ``directories``, which may extend ``base.html.jinja``.

    Text is escaped, and a name that is missing is an error. ``style`` is the shared style with the ``style.css`` of
    each directory behind it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*directories, SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sheets = (SHARED / "page.css", *(directory / "style.css" for directory in directories))
    environment.globals["style"] = "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    return environment


def svg_document(chart: Chart) -> str:
    """``chart`` as an SVG file of its own, with title and legend."""
    return page_environment().get_template("chart.svg.jinja").render({"chart": chart})


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _buckets(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, float, float]]:
    """Step, mean, lowest and highest value of neighbours that are drawn as one point."""
    size = max(1, math.ceil(len(points) / POINTS))
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part]
        yield part[-1][0], math.fsum(values) / len(values), min(values), max(values)


def _finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    finite = ((step, value) for step, value in points if value is not None and math.isfinite(value))
    return [(step, min(max(value, -LARGEST), LARGEST)) for step, value in finite]


def _round_marks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers, evenly spaced, that enclose both: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max((high - low) / 4, sys.float_info.min)))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 5)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
