"""The benchmark of the driver runs, and fills every cell of its page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_figures_of_the_page_are_complete(tmp_path: Path) -> None:
    page = Path(shutil.copy(ROOT / "docs" / "scaling.md", tmp_path))
    script = ROOT / "benchmarks" / "driver_traffic.py"
    chosen = ["--ranks", "8", "--tokens", "1000000", "--repeats", "1", "--page", str(page)]
    subprocess.run([sys.executable, script, *chosen], check=True, capture_output=True, timeout=600)
    text = page.read_text(encoding="utf-8")
    figures = text.partition("<!-- figures:")[2].partition("<!-- end of figures -->")[0]
    rows = [line for line in figures.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 4 + 2 + 4 + 2 * 2  # heads; traffic; limits; shares
    assert not [row for row in rows if "|  |" in row]
