"""Anonymous memory of processes, measured from outside of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.001


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process: allocated and touched pages, without the pages of mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not tell RssAnon")


class Peaks:
    """Memory of each process at the start, and its peak since."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self.before = [own_bytes(pid) for pid in pids]
        self.highest = list(self.before)

    def look(self) -> None:
        for place, pid in enumerate(self._pids):
            self.highest[place] = max(self.highest[place], own_bytes(pid))

    @property
    def growth(self) -> list[int]:
        """Peak of each process above its memory at the start, in bytes."""
        return [high - low for high, low in zip(self.highest, self.before, strict=True)]


@contextmanager
def peaks_of(pids: Sequence[int]) -> Iterator[Peaks]:
    """Watch the processes ``pids`` from a thread of this one, which has nothing else to do meanwhile."""
    peaks, done = Peaks(pids), threading.Event()

    def watch() -> None:
        while not done.is_set():
            peaks.look()
            time.sleep(INTERVAL_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()
        peaks.look()
