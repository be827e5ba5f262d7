"""Directories that servers read, under names that SGLang reads as names."""

from __future__ import annotations

import glob
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PlainName", "plain_name"]


@dataclass(frozen=True)
class PlainName:
    """A name of a directory, and the link that it is, if it is one."""

    path: Path
    link: Path | None

    def remove(self) -> None:
        """Remove the link; the directory stays."""
        if self.link is not None:
            shutil.rmtree(self.link.parent, ignore_errors=True)


def plain_name(directory: Path) -> PlainName:
    """``directory``, or a link to it where SGLang (0.5.23) would take its name for a pattern."""
    if glob.escape(str(directory)) == str(directory):
        return PlainName(directory, None)
    link = Path(tempfile.mkdtemp(prefix="core-rl-sglang-")) / "weights"
    link.symlink_to(directory)
    return PlainName(link, link)
