"""Curves of a run's metrics: places in the drawing, ready for a template to write as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Panel", "Tick", "panels"]

Rows = Sequence[Mapping[str, float | None]]

LEFT, RIGHT, TOP, BOTTOM = 58.0, 472.0, 10.0, 206.0
"""The edges of the axes in a drawing of 480 by 230."""
POINTS = 240
"""A curve has no more: several steps are drawn as their mean, inside the band of all their values."""
FEW = 40
"""Up to so many values, each gets a dot."""

TITLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "eval_reward", "eval_reward_greedy")),
    ("Loss", ("loss", "eval_loss")),
    ("Accuracy", ("accuracy", "eval_accuracy")),
    ("KL to the reference", ("kl_k1", "kl_k2", "kl_k3")),
    ("KL of the step's updates", ("approx_kl",)),
    ("Share of clipped tokens", ("clip_fraction",)),
    ("Entropy", ("entropy",)),
    ("Gradient norm", ("grad_norm", "critic_grad_norm")),
    ("Tokens of an answer", ("answer_tokens",)),
    ("Share of answers and groups", ("truncated", "groups_without_signal", "mixed_versions")),
    ("Mismatch: KL(rollout ‖ trainer)", ("mismatch_k1", "mismatch_k3", "mismatch_chi2")),
    ("Mismatch: largest difference", ("mismatch_max",)),
    ("Staleness in versions", ("staleness_mean", "staleness_max")),
    ("Learning rate", ("lr", "critic_lr")),
    ("Seconds of each phase", ("time_*",)),
    ("Tokens per second", ("tokens_per_s",)),
)
"""The drawings that come first, and whose curves are in them; ``*`` stands for any ending."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric; ``line`` and ``band`` are lists of points as SVG writes them."""

    name: str
    number: int
    """Its number in the drawing: its colour."""
    line: str
    band: str
    dots: tuple[tuple[float, float], ...]
    last: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing."""

    title: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    main: bool
    """Whether it is one of those that come first."""
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


def panels(rows: Rows) -> list[Panel]:
    """The drawings of all metrics in ``rows``: those that belong together in one, every other one by itself."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("step", "version")))
    last = max((row["step"] or 0.0 for row in rows), default=0.0)
    found = []
    for title, wanted in TITLES:
        own = [name for pattern in wanted for name in names if _matches(name, pattern)]
        names = [name for name in names if name not in own]
        found.append(_panel(title, own, rows, last, main=True))
    found += [_panel(name, [name], rows, last, main=False) for name in sorted(names)]
    return [panel for panel in found if panel is not None]


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _panel(title: str, names: Sequence[str], rows: Rows, last: float, *, main: bool) -> Panel | None:
    series = [(name, _series(rows, name)) for name in names]
    series = [(name, points) for name, points in series if points]
    if not series:
        return None
    y_marks = _marks(value for _, points in series for _, value in points)
    x_marks = _marks([0.0, last], whole=True)
    low, high = y_marks[0], y_marks[-1]

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / (last or 1.0), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def curve(number: int, name: str, points: Sequence[tuple[float, float]]) -> Curve:
        parts = list(_buckets(points))
        places = [(x(step), y(mean)) for step, mean, _, _ in parts]
        upper = [(x(step), y(most)) for step, _, _, most in parts]
        lower = [(x(step), y(least)) for step, _, least, _ in parts]
        return Curve(
            name=name,
            number=number,
            line=_points(places),
            band=_points(upper + lower[::-1]) if len(parts) < len(points) else "",
            dots=tuple(places) if len(points) <= FEW else (),
            last=f"{points[-1][1]:.4g}",
        )

    return Panel(
        title=title,
        curves=tuple(curve(number, name, points) for number, (name, points) in enumerate(series)),
        x_ticks=tuple(Tick(at=x(mark), label=f"{mark:g}") for mark in x_marks if mark <= last),
        y_ticks=tuple(Tick(at=y(mark), label=f"{mark:.6g}") for mark in y_marks),
        main=main,
    )


def _series(rows: Rows, name: str) -> list[tuple[float, float]]:
    found = ((row["step"] or 0.0, row.get(name)) for row in rows)
    return [(step, value) for step, value in found if value is not None]


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _buckets(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, float, float]]:
    """Step, mean, lowest and highest value of neighbours that are drawn as one point."""
    size = math.ceil(len(points) / POINTS)
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part]
        yield part[-1][0], math.fsum(values) / len(values), min(values), max(values)


def _marks(values: Iterable[float], *, whole: bool = False) -> list[float]:
    """Round numbers, evenly spaced, that enclose ``values``: steps of 1, 2 or 5 times a power of ten."""
    kept = list(values)
    low, high = min(kept), max(kept)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 5)
    if whole:
        step, low = max(step, 1.0), 0.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
