"""The scoreboard by version: the order of checks, the newest state with the earlier ones, and what is no score."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_support import case, report

from core_rl.cli import main
from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.report.files import read_reports
from core_rl_conformance.report.history import history_markdown
from core_rl_conformance.report.model import Report
from core_rl_conformance.report.scoreboard import merge

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def _rows(*reports: Report) -> dict[str, list[str]]:
    """The cells of each check, in the order of the page."""
    _, _, checks = history_markdown(merge(reports)).partition("## Checks")
    lines = [line.strip("| ").split(" | ") for line in checks.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def test_newest_version_stands_before_earlier_ones() -> None:
    failed = report(case(outcome=Outcome.FAILED), case(layout="dp2"), version="0.2.0", hours=1)
    rows = _rows(report(case()), failed, report(case(), version="0.3.0", hours=2))
    assert rows["I2.logprobs"][-1] == "✅ 1 (❌ 1 of 2 in 0.2.0; ✅ 1 in 0.1.0)"


def test_failures_of_one_package_come_first() -> None:
    mine = report(case(), case("I10.value", Outcome.WAIVED))
    other = report(case(engine="other"), case("I10.value", engine="other"))
    rows = _rows(mine, other)
    assert list(rows) == ["I10.value", "I2.logprobs"]
    assert rows["I10.value"] == ["`mine`", "⚠️ 1 of 1", "✅ 1"]


def test_unexecuted_cases_are_no_scores() -> None:
    rows = _rows(report(case(outcome=Outcome.NOT_RUN), case("I10.value", Outcome.NOT_SUPPORTED)))
    assert rows == {"I2.logprobs": ["", "not run"], "I10.value": ["", "-"]}


def test_page_shows_committed_reports() -> None:
    files = sorted(file for file in RESULTS.glob("*.json") if file.name != "field.json")
    assert history_markdown(merge(read_reports(files))) == (RESULTS / "scoreboard.md").read_text()


def test_command_writes_history(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as end:
        main(["report", str(RESULTS / "pairs.json"), "--history", str(page)])
    assert not end.value.code
    assert page.read_text().startswith("# Scoreboard")
