"""What a point gets, and how it says that it cannot run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

__all__ = ["Figures", "NotRun", "Setting"]

Figures = Mapping[str, float | str]
"""Values by name; the name ends with the unit."""
T = TypeVar("T")


class NotRun(Exception):
    """The machine lacks what a point needs; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and the sizes of a run."""

    device: Literal["cpu", "cuda"]
    """``cuda``, or ``cpu`` for a rehearsal."""
    directory: Path
    """For files that a point writes; empty at its beginning."""

    @property
    def rehearsal(self) -> bool:
        """Whether everything is tiny."""
        return self.device == "cpu"

    def size(self, real: T, tiny: T) -> T:
        """``real``, or ``tiny`` in a rehearsal."""
        return tiny if self.rehearsal else real

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of kernels."""
        return torch.bfloat16

    def milliseconds(self, work: Callable[[], Any], repeats: int = 10) -> float:
        """The median time of ``work()``, after two calls that do not count."""
        times = []
        for number in range(-2, self.size(repeats, 2)):
            self.finish()
            start = time.perf_counter()
            work()
            self.finish()
            if number >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_mib(self, work: Callable[[], Any]) -> float:
        """Memory that ``work()`` adds on the device at its peak; 0 on the CPU, which does not count it."""
        if self.device != "cuda":
            work()
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def free_bytes(self) -> int:
        """Memory of the device that no process has, once torch keeps none for itself; 0 on the CPU."""
        if self.device != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
