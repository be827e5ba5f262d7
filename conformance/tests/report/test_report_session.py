"""``--report`` in real sessions of pytest, each a process of its own away from the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from core_rl_conformance.outcomes import PROPERTY, CaseRecord, Outcome
from core_rl_conformance.report.files import read_report
from core_rl_conformance.report.model import CapabilityState, Verdict

SUITE = ["--pyargs", "core_rl_conformance", "-p", "no:cacheprovider", "--engine=reference", "--quick"]


def _pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *SUITE, *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.nightly)])
def test_session_writes_report_page_and_junit(tmp_path: Path, workers: list[str]) -> None:
    result = _pytest(
        tmp_path, "--report=out/a.json", "--junitxml=junit.xml", "-k", "I7.values or version", *workers
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "report: out/a.json and out/a.html" in result.stdout
    report = read_report(tmp_path / "out" / "a.json")
    assert sorted(case.check for case in report.results) == ["I7.values", "contract.version"]
    assert all(case.outcome is Outcome.PASSED for case in report.results)
    (engine,) = report.engines
    assert (engine.name, engine.distribution) == ("reference", "core-rl")
    assert len(engine.code.digest) == len(report.suite_code.digest) == 64
    assert (report.complete, engine.verdict) == (False, Verdict.PARTIAL)
    # I7.values is among the checks that a value head needs.
    assert {part.state for part in engine.capabilities} == {CapabilityState.UNCERTIFIED}
    assert "--report=out/a.json" in report.command and "torch" in report.environment.packages
    suites = ET.parse(tmp_path / "junit.xml").getroot()
    retained = [
        [
            (part.get("name", ""), part.get("value", ""))
            for part in case.iter("property")
            if part.get("name") == PROPERTY
        ]
        for case in suites.iter("testcase")
    ]
    assert len(retained) == 2 and {len(properties) for properties in retained} == {1}
    read = [CaseRecord.from_properties(properties) for properties in retained]
    assert {record.check for record in read if record} == {"I7.values", "contract.version"}


@pytest.mark.nightly
def test_a_bad_destination_ends_the_session_at_once(tmp_path: Path) -> None:
    result = _pytest(tmp_path, "--report=a.xml")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--report=a.xml: the name must end in .json" in result.stderr
