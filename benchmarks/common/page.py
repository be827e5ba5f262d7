"""Figures of a benchmark on a page of the documentation, between two comments."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["write_figures"]


def write_figures(page: Path, script: str, text: str) -> None:
    """Replace the figures of ``script`` on ``page``; raises ``SystemExit`` where the page has none."""
    begin, end = f"<!-- figures: {script} -->\n", "<!-- end of figures -->"
    old = page.read_text(encoding="utf-8")
    between = re.escape(begin) + ".*?" + re.escape(end)
    new, count = re.subn(
        between, lambda _: f"{begin}\n{text.strip()}\n\n{end}", old, count=1, flags=re.DOTALL
    )
    if not count:
        raise SystemExit(f"{page} has no {begin.strip()}")
    page.write_text(new, encoding="utf-8")
