"""Merging reports into a scoreboard, and the command that does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import run_command
from page_policy import blocked_sources
from report_support import EVERYTHING, case, measured, report

from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.report.files import write_report
from core_rl_conformance.report.model import CapabilityState, Report, Verdict, report_schema
from core_rl_conformance.report.scoreboard import Scoreboard, markdown, merge, scoreboard_page

PASSED = report(case(), case("I10.value"))


def _states(board: Scoreboard) -> list[str]:
    return [capability.state for entry in board.entries for capability in entry.engine.capabilities]


def test_engines_of_several_reports_stand_side_by_side() -> None:
    board = merge([PASSED, report(case(engine="other"), declared=("moe",)), report(case(), version="0.2.0")])
    assert board.titles == ["mine 0.1.0", "mine 0.2.0", "other 0.1.0"]
    assert list(board.capabilities) == ["moe", "value_head"]
    assert [cell and cell.state for cell in list(board.capabilities.values())[1]] == [
        CapabilityState.CERTIFIED,
        CapabilityState.UNCERTIFIED,
        None,
    ]
    assert [entry.checks_passed for entry in board.entries] == ["2 of 2", "1 of 1", "1 of 1"]
    assert [check.identifier for check in board.checks] == ["I2.logprobs", "I10.value"]


def test_support_page_shows_committed_reports(tmp_path: Path) -> None:
    docs, page = Path(__file__).parents[3] / "docs", tmp_path / "support.md"
    reports = map(str, sorted(docs.glob("results/versions/*.json")))
    assert run_command("report", *reports, "--versions", str(page)) == 0
    assert page.read_text() == (docs / "support.md").read_text()


FAILED = case("I10.value", Outcome.FAILED)
MERGES = [
    pytest.param(
        [PASSED, report(FAILED, hours=1)], Verdict.FAILED, "not certified", id="a later failure counts"
    ),
    pytest.param(
        [report(FAILED), report(case("I10.value"), hours=1)], Verdict.PASSED, "certified", id="mended"
    ),
    pytest.param(
        [report(case("I10.value"), hours=1), report(FAILED)], Verdict.PASSED, "certified", id="any order"
    ),
    pytest.param(
        [report(FAILED), report(case("I10.value", seed=1), hours=1)],
        Verdict.FAILED,
        "not certified",
        id="another seed is another case",
    ),
    pytest.param(
        [PASSED, report(case(), case("I10.value", Outcome.NOT_RUN), hours=1)],
        Verdict.PASSED,
        "certified",
        id="not run replaces nothing",
    ),
    pytest.param(
        [report(case("I10.value", Outcome.NOT_RUN)), report(case("I10.value", layout="dp2"), hours=1)],
        Verdict.PASSED,
        "certified",
        id="it ran elsewhere",
    ),
    pytest.param([report(case(), complete=False)] * 2, Verdict.PARTIAL, "uncertified", id="parts"),
    pytest.param(
        [PASSED, report(case(), complete=False, hours=1)], Verdict.PASSED, "certified", id="whole and part"
    ),
]


@pytest.mark.parametrize(("reports", "verdict", "state"), MERGES)
def test_reports_merge_by_case(reports: list[Report], verdict: Verdict, state: str) -> None:
    board = merge(reports)
    assert [entry.engine.verdict for entry in board.entries] == [verdict]
    assert _states(board) == [state]


@pytest.mark.parametrize(("code", "suite"), [("0ther", "5417e"), ("c0de", "0ther")])
def test_different_codes_never_merge(code: str, suite: str) -> None:
    newer = report(case("I10.value"), hours=1, code=code, suite=suite)
    board = merge([report(FAILED), newer, report(case(), hours=2)])
    assert [entry.engine.verdict for entry in board.entries].count(Verdict.FAILED) == 1
    assert sorted(len(entry.cases) for entry in board.entries) == [1, 2]
    assert len(board.titles) == 2 and all(title.startswith("mine 0.1.0 ") for title in board.titles)
    for text in (markdown(board), scoreboard_page(board)):
        assert "mine 0.1.0: the reports are about different code" in text
        assert "0ther" in text and "c0de (commit 12345678-dirty)" in text


def test_gpu_case_keeps_cpu_case() -> None:
    bad = case(outcome=Outcome.FAILED)
    board = merge([report(bad), report(case(capabilities=("cuda",)), declared=("cuda",), hours=1)])
    assert board.entries[0].engine.verdict is Verdict.FAILED


def test_partners_have_rows_of_their_own() -> None:
    near, far = measured(1e-6), measured(5e-6)
    fsdp = report(case(partner="fsdp", measurements=(near,)), case(partner="fsdp", layout="dp2"))
    board = merge([fsdp, report(case(partner="megatron", measurements=(near, far)), hours=1)])
    _, _, pairs = markdown(board).partition("| pair ")
    assert "| mine 0.1.0 with fsdp | 2 of 2 | qwen3 | float32 | 1.0e-06 of 1.0e-05: logprobs" in pairs
    assert "| mine 0.1.0 with megatron | 1 of 1 | qwen3 | float32 | 5.0e-06 of 1.0e-05: logprobs" in pairs


def test_the_same_report_twice_counts_once() -> None:
    assert len(merge([PASSED, PASSED]).entries[0].cases) == 2


def test_markdown_is_a_single_table() -> None:
    table, _, legend = markdown(merge([EVERYTHING])).partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    assert rows[0] == ["", "mine 0.1.0", "other 0.1.0"]
    assert {len(row) for row in rows} == {3}
    cells = {row[0]: row[1:] for row in rows}
    assert cells["verdict"] == ["❌ failed", "○ not run"]
    assert cells["checks passed"] == ["1 of 2", "0 of 0"]
    assert cells["`value_head`"] == ["❌", "○"]
    assert "certified" in legend


def test_the_page_lists_engines_and_checks() -> None:
    page = scoreboard_page(merge([EVERYTHING]))
    assert blocked_sources(page) == []
    assert all(
        part in page for part in ("mine 0.1.0", "I10.value", "An engine &amp; a half", "1 of 2 checks passed")
    )


# --------------------------------------------------------------- the command


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_report(PASSED, first)
    write_report(report(case(engine="other", measurements=(measured(0.5, 1.0),))), second)
    assert run_command("report", str(first), str(second)) == 0
    printed = capsys.readouterr().out
    assert "| mine 0.1.0 | other 0.1.0 |" in printed
    table, page = tmp_path / "table.md", tmp_path / "page.html"
    assert run_command("report", str(first), str(second), "--markdown", str(table), "--html", str(page)) == 0
    assert capsys.readouterr().out == ""
    assert table.read_text(encoding="utf-8") == printed
    assert "</html>" in page.read_text(encoding="utf-8")


def test_report_command_names_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "a.json", tmp_path / "b.json"
    write_report(PASSED, good)
    bad.write_text(good.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert run_command("report", str(good), str(bad), "--markdown", str(tmp_path / "table.md")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "b.json is damaged" in captured.err
    assert not (tmp_path / "table.md").exists()


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", "--schema") == 0
    assert json.loads(capsys.readouterr().out) == report_schema()


def test_the_command_without_a_file_is_wrong_usage() -> None:
    assert run_command("report") == 2
