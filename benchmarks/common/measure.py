"""Side-by-side timing: both sides interleaved in one run, medians with quartiles, ratios."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

__all__ = ["Side", "interleave", "report"]


@dataclass(frozen=True)
class Side:
    """One contender: a function that does the work once and the real tokens that it handles."""

    run: Callable[[], None]
    tokens: int


def interleave(sides: Mapping[str, Side], *, repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each run: every round runs every side once, and starts with another one each time."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in track(range(-warmup, repeats), description="measuring"):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            sides[name].run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(title: str, sides: Mapping[str, Side], seconds: Mapping[str, list[float]], *, base: str) -> None:
    """A table of seconds, real tokens/s, and the ratio to ``base`` in the same round."""
    table = Table(title=title, caption=f"median (quartiles) of {_rounds(seconds)} rounds; {_hardware()}")
    table.add_column("")
    for column in ("seconds", "real tokens/s", f"time / {base}"):
        table.add_column(column, justify="right")
    for name, times in seconds.items():
        ratios = [own / other for own, other in zip(times, seconds[base], strict=True)]
        speed = f"{sides[name].tokens / statistics.median(times):,.0f}"
        table.add_row(name, _spread(times), speed, _spread(ratios))
    Console(width=max(110, Console().width)).print(table)


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _rounds(seconds: Mapping[str, list[float]]) -> int:
    return min(map(len, seconds.values()))


def _hardware() -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    runs = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{device}; {runs}"
