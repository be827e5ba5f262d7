"""The engine under a few checks of the conformance suite in their quick form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = (
    "I7.rollout-logprobs",
    "I7.score",
    "I12.receive-disk",
    "I12.receive-tensor",
    "contract.rollout-pause",
)


def test_the_first_checks_pass(tmp_path: Path) -> None:
    selected = [f"--check={check}" for check in CHECKS]
    arguments = [
        "--engine=plain",
        "--quick",
        *selected,
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "core_rl_conformance",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
