"""Side-by-side timing: both sides interleaved in one run, medians with quartiles, ratios."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

Result = TypeVar("Result")

Side = Callable[[], object]
"""A function that does the work once."""


def compare(
    title: str, sides: Mapping[str, Side], amount: int, *, base: str, repeats: int, warmup: int = 2
) -> None:
    """Time ``sides``; rank 0 prints seconds, the ``amount`` of each second, and the ratio to ``base`` in its round."""
    timed = {name: partial(_seconds, side) for name, side in sides.items()}
    seconds = rounds(timed, repeats=repeats, warmup=warmup)
    if not _is_first():
        return
    caption = f"median (quartiles) of {repeats} rounds; {_hardware()}"
    table = figures_table(["", "seconds", "real tokens/s", f"time / {base}"], title=title, caption=caption)
    for name, times in seconds.items():
        ratios = [time_s / base_s for time_s, base_s in zip(times, seconds[base], strict=True)]
        speed = f"{amount / statistics.median(times):,.0f}"
        table.add_row(name, spread(times), speed, spread(ratios))
    show(table)


def figures_table(columns: Sequence[str], *, title: str, caption: str | None = None) -> Table:
    """A table of figures below ``columns``, of which the first has the names of the rows."""
    first, *others = columns
    return Table(first, *(Column(name, justify="right") for name in others), title=title, caption=caption)


def show(table: Table) -> None:
    """Print ``table``, wider than a narrow terminal."""
    Console(width=max(120, Console().width)).print(table)


def rounds(
    sides: Mapping[str, Callable[[], Result]], *, repeats: int, warmup: int
) -> dict[str, list[Result]]:
    """The results of ``repeats`` rounds: each runs every side once, and starts with another one than the last."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    names = list(sides)
    for number in track(range(-warmup, repeats), description="measuring", disable=not _is_first()):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def _seconds(side: Side) -> float:
    """Seconds of one run. With several ranks, all run it at the same time, until the slowest is done."""
    _wait()
    start = time.perf_counter()
    side()
    _wait()
    return time.perf_counter() - start


def _is_first() -> bool:
    """Whether this process prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    """For the device and for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def spread(values: list[float]) -> str:
    """The median and the quartiles, or the one value."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _hardware() -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    runs = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{device}; {runs}"
