"""CPU time of a process with all its descendants, while they live."""

from __future__ import annotations

import psutil

POLL_S = 0.2
"""Seconds between two looks at the CPU times of a run's processes."""


def note_cpu_times(pid: int, spent: dict[int, float]) -> None:
    """Set the CPU seconds of each living process of the tree; ended processes keep their last value."""
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            spent[process.pid] = times.user + times.system
    except psutil.NoSuchProcess:
        return  # ended meanwhile; the next look sees the others
