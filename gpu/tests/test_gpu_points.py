"""Processes, time limits and the report of points; the points themselves are rehearsed by their own modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_points import Figures, NotRun, Setting, run_point
from page_policy import blocked_sources


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "status"),
    [pytest.param([], "passed", marks=pytest.mark.nightly), (["--gpu"], "not run")],
    ids=["rehearsal", "gpu"],
)
def test_report_lists_points(arguments: list[str], status: str, tmp_path: Path) -> None:
    command = ["pytest", "-q", "-k", "test_machine", "-p", "no:cacheprovider", f"--gpu-report={tmp_path}"]
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments, str(tests)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    (point,) = report["points"]
    assert (point["name"], point["status"]) == ("machine", status)
    assert report["counts"] == {"passed": 0, "failed": 0, "not run": 0} | {status: 1}
    page = (tmp_path / "gpu-report.html").read_text()
    assert 'id="machine"' in page
    assert ("a rehearsal" in page) == (not arguments)
    assert blocked_sources(page) == []


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
    limits = {raises: 120.0, sleeps: 3.0, lacks: 120.0, crashes: 120.0, works: 120.0}
    outcomes = [run_point(point, "cpu", limit, tmp_path / point.__name__) for point, limit in limits.items()]
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "not run", "failed", "passed"]
    assert outcomes[0].message == "ValueError: a kernel is missing"
    assert outcomes[1].message.startswith("took more than its 3 s")
    assert outcomes[3].message == "its process ended with 7\nillegal memory access"
    assert outcomes[4].figures == {"device": "cpu"}
