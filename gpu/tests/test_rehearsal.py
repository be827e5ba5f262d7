"""The points on the CPU: the same code, time limits and report as on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from core_rl_gpu.points import POINTS, Point
from core_rl_gpu.runner import run_points
from core_rl_gpu.setting import Figures, NotRun, Setting

GPU = Path(__file__).parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(GPU), "COLUMNS": "200"}
    environment.pop("CORE_RL_SGLANG_PYTHON", None)
    return subprocess.run(
        [sys.executable, "-m", "core_rl_gpu", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "gpu-report.json").read_text())
    return found


SUITES = ["suite-float32", "suite-bfloat16", "megatron"]
"""Points that are sessions of the conformance suite, each with imports of its own."""
SHORT = [point.name for point in POINTS if point.name not in SUITES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param(SHORT, id="short"), pytest.param(SUITES, id="suites", marks=pytest.mark.nightly)]
)
def test_all_points_run_on_the_cpu(names: list[str], tmp_path: Path) -> None:
    done = command("--rehearse", "--out", str(tmp_path), *names)
    points = report(tmp_path)["points"]
    assert [point["name"] for point in points] == [point.name for point in POINTS if point.name in names]
    failed = {point["name"]: point["message"] for point in points if point["status"] == "failed"}
    assert not failed
    assert done.returncode == 0, done.stderr
    unavailable = {point["name"]: point["message"] for point in points if point["status"] == "not run"}
    assert list(unavailable) == [name for name in names if name == "sglang"]
    assert all("has no SGLang" in message for message in unavailable.values())
    assert all(point["figures"] for point in points if point["status"] == "passed")
    page = (tmp_path / "gpu-report.html").read_text()
    assert "a rehearsal" in page
    assert all(f'id="{name}"' in page for name in names)


def test_without_a_gpu_nothing_runs_and_nothing_fails(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert report(tmp_path)["counts"] == {"passed": 0, "failed": 0, "not run": len(POINTS)}


def test_an_unknown_point_is_refused() -> None:
    done = command("speed")
    assert done.returncode == 2
    assert "no such point: speed; there are machine, group" in " ".join(done.stderr.split())


def raises(setting: Setting) -> Figures:
    raise ValueError("a kernel is missing")


def sleeps(setting: Setting) -> Figures:
    time.sleep(600)
    return {}


def lacks(setting: Setting) -> Figures:
    raise NotRun("no SGLang here")


def crashes(setting: Setting) -> Figures:
    os.write(2, b"illegal memory access\n")
    os._exit(7)


def works(setting: Setting) -> Figures:
    return {"device": setting.device}


def test_failing_point_does_not_stop_run(tmp_path: Path) -> None:
    names = ("raises", "sleeps", "lacks", "crashes", "works")
    points = [Point(name, f"test_rehearsal:{name}", 3.0, name) for name in names]
    outcomes = {found.name: found for found in run_points(points, "cpu", tmp_path)}
    assert [found.status for found in outcomes.values()] == [
        "failed",
        "failed",
        "not run",
        "failed",
        "passed",
    ]
    assert outcomes["raises"].message == "ValueError: a kernel is missing"
    assert outcomes["sleeps"].message.startswith("took more than its 3 s")
    assert outcomes["crashes"].message == "its process ended with 7\nillegal memory access"
    assert outcomes["works"].figures == {"device": "cpu"}
