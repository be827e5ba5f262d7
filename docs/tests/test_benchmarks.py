"""Every benchmark starts: its imports exist, and its options are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
SHOW_HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, script
"""
"""All in one process, which imports torch once."""


@pytest.mark.nightly
def test_benchmarks_show_their_help() -> None:
    command = [sys.executable, "-c", SHOW_HELP, *map(str, BENCHMARKS)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("usage: ") == len(BENCHMARKS)
