"""Environments that lie over another: packages of their own, and all others of the Python below."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core_rl_conformance.report.files import ReportError, read_report
from core_rl_conformance.report.model import Report

SITES = (
    "import json, sysconfig; print(json.dumps([sysconfig.get_path(name) for name in ('purelib', 'platlib')]))"
)
"""Prints the directories of a Python's packages."""
SHOWN_LINES = 15


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """The end of one session of the suite."""

    report: Report | None
    """None where the session ended before there was a report."""
    tail: str
    """The last lines of its output."""


def layer(home: Path, requirements: Sequence[str], python: str = sys.executable) -> str | None:
    """Make the environment ``home`` over ``python``'s, and install ``requirements`` in it; the Python of ``home``.

    Requirements that the environment below meets are not installed again. None where pip cannot install them.
    """
    binary = home / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True, capture_output=True)
    sites = json.loads(_output(python, "-c", SITES))
    site = Path(json.loads(_output(str(binary), "-c", SITES))[0])
    # `addsitedir` reads the path files below as well, with which editable installs work.
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(sites)]
    (site / "_below.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(binary) if _pip(str(binary), "install", "--quiet", *requirements).returncode == 0 else None


def run_suite(
    python: str, arguments: Sequence[str], report: Path, environment: Mapping[str, str] | None = None
) -> SuiteRun:
    """Run the suite with ``arguments`` of pytest in a process of ``python``, which writes ``report``."""
    command = [python, "-m", "pytest", "-q", *arguments, f"--report={report}"]
    result = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    try:
        return SuiteRun(report=read_report(report), tail=_tail(result.stdout))
    except ReportError:
        return SuiteRun(report=None, tail=_tail(result.stdout))


def _pip(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
