"""Most useful line of a crash: the innermost frame of the engine's code."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["last_line"]

FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<number>\d+)(?:,)? in (?P<function>.+)$')
FOREIGN = (sysconfig.get_path("stdlib"), "<frozen", "<string>")
INSTALLED = ("site-packages", "dist-packages")
OWN = ("core_rl", "core_rl_conformance")
"""Packages whose frames only pass calls on."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    file: str
    number: str
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}, in {self.function}" + (
            f": {self.source}" if self.source else ""
        )

    @property
    def rank(self) -> int:
        """0 for the engine's own code, 1 for a library, 2 for code that only passes calls on."""
        parts = Path(self.file).parts
        if any(self.file.startswith(start) for start in FOREIGN) or any(name in parts for name in OWN):
            return 2
        return 1 if any(name in parts for name in INSTALLED) else 0


def last_line(traceback: str) -> str | None:
    """The innermost frame of the engine's code in a traceback of Python's, or in stacks of a crash; None without any.

    Where it has none, that of a library counts. Stacks have the innermost frame first, and the thread that crashed is
    called the current one.
    """
    _, crashed, stacks = traceback.partition("Current thread")
    innermost_first = bool(crashed) or "most recent call first" in traceback
    text = stacks.split("\n\n")[0] if crashed else traceback
    frames = list(_frames(text))
    if not innermost_first:
        frames.reverse()
    innermost = min(frames, key=lambda frame: frame.rank, default=None)  # the first of equals
    return None if innermost is None else str(innermost)


def _frames(text: str) -> Iterator[_Frame]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := FRAME.match(line):
            after = lines[number + 1] if number + 1 < len(lines) else ""
            source = after.strip() if after.startswith("    ") and not FRAME.match(after) else ""
            yield _Frame(
                file=match["file"], number=match["number"], function=match["function"], source=source
            )
