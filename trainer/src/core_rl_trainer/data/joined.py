"""Examples of several files, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from core_rl_trainer.data.examples import Example, Examples

__all__ = ["JoinedExamples"]


class JoinedExamples(Examples):
    """The examples of all ``parts``, the files of a directory."""

    def __init__(self, origin: str, parts: Sequence[Examples]) -> None:
        self.origin = origin
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Example:
        part, number = self._place(index)
        return part[number]

    def label(self, index: int) -> str:
        part, number = self._place(index)
        return f"{Path(part.origin).name}: {part.label(number)}"

    def _place(self, index: int) -> tuple[Examples, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)
