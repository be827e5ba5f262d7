"""When engines work: intervals on the machine's clock, from all processes of a run in one file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from core_rl.engine.train import TrainEngine
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl_fsdp.engine import FSDPBackend

__all__ = ["BUSY_FILE", "BusyFSDP", "busy", "busy_seconds", "watch_rollouts"]

BUSY_FILE = "CORE_RL_BENCH_BUSY"
"""The environment variable that names the file."""
CALLS = ("forward", "train_batch", "lr_scheduler_step", "upload_weights", "set_version")
"""What a training step asks of a train engine."""


@contextmanager
def busy() -> Iterator[None]:
    """Note that an engine works inside the context. The clock is the same in all processes of a machine."""
    start = time.monotonic()
    try:
        yield
    finally:
        with Path(os.environ[BUSY_FILE]).open("a", encoding="utf-8") as file:
            file.write(f"{start} {time.monotonic()}\n")


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with busy():
            return method(*arguments, **named)

    return call


class BusyFSDP(FSDPBackend):
    """The backend of engines that note when they work: those of each process that imports this module."""


for name in CALLS:
    setattr(TrainEngine, name, _noted(getattr(TrainEngine, name)))


def watch_rollouts() -> None:
    """Have the reference rollout engines of this process note when they generate or take weights."""
    for method in ("_drain", "_install_from_disk"):
        setattr(ReferenceRolloutBackend, method, _noted(getattr(ReferenceRolloutBackend, method)))


def busy_seconds(path: Path, start: float, end: float) -> float:
    """For how long between ``start`` and ``end`` at least one engine was at work."""
    intervals = sorted(
        (max(a, start), min(b, end))
        for a, b in (map(float, line.split()) for line in path.read_text(encoding="utf-8").splitlines())
        if b > start and a < end
    )
    total, reached = 0.0, start
    for a, b in intervals:
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total
