"""Reports as submissions, their badges, and annotations of failures."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from report_support import CHECKS, EVERYTHING, NOON, case, report
from typer.testing import CliRunner

from core_rl.cli import build_app
from core_rl.errors import ConfigError
from core_rl_conformance.report import verify
from core_rl_conformance.report.certify import PROFILES, lacking
from core_rl_conformance.report.files import ReportError, write_report
from core_rl_conformance.report.html import badge, badge_of
from core_rl_conformance.report.model import Report
from core_rl_conformance.report.verify import shortcomings, verify_reports

GOOD = report(case(), case("I10.value"))
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def suite_of_two_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed suite has the checks of the reports above."""
    monkeypatch.setattr(verify, "load_checks", lambda: {check.identifier: check for check in CHECKS})


def test_complete_report_is_verified() -> None:
    verify_reports({"mine.json": GOOD})


def test_certified_bfloat16_is_verified_from_a_file() -> None:
    cases = [case(check.identifier, dtype="bfloat16", capabilities=("bfloat16",)) for check in CHECKS]
    written = report(*cases, declared=("bfloat16",))
    assert written.engines[0].capabilities[0].meaning
    verify_reports({"mine.json": Report.model_validate_json(written.model_dump_json())})


PROBLEMS: list[tuple[Change, str]] = [
    (lambda r: r["results"].pop(), "checks without a result: I10.value"),
    (lambda r: r["results"][0].update(outcome="failed"), "failed without a message"),
    (lambda r: r["results"][0].update(outcome="not run", reason="no GPU"), "was not run: no GPU"),
    (
        lambda r: r["results"][0]["measurements"][0].update(error=2e-5),
        "passed with an error of 2.0e-05, and 1.0e-05 is allowed",
    ),
    (lambda r: r["results"][0].update(message="boom"), "passed with the message of a failure"),
    (lambda r: r["engines"][0].update(verdict="failed"), "its verdict is 'failed', and its results give"),
    (
        lambda r: r["engines"][0]["capabilities"][0].update(state="uncertified"),
        "capabilities do not follow from its results",
    ),
    (lambda r: r["engines"][0].update(problems=["gap"]), "its results give 'failed'"),
    (lambda r: r.update(complete=False), "its command left cases out"),
    (
        lambda r: r.update(complete=False, command=f"{r['command']} --quick"),
        "its command is quick and proves a part alone",
    ),
    (lambda r: r.update(suite_version="0.0.1"), "it is of core-rl 0.0.1, and .* is installed"),
    (lambda r: r.update(command="pytest --engine=other"), "does not name the engine 'mine'"),
    (lambda r: r.update(command="make report"), "does not run pytest"),
    (
        lambda r: r["checks"].append({**r["checks"][0], "identifier": "I99.mine"}),
        "lists checks that the suite does not have: I99.mine",
    ),
    (
        lambda r: r["environment"]["packages"].update({"core-rl-mine": "9.9"}),
        "it has version 0.1.0, and the environment 9.9",
    ),
]


@pytest.mark.parametrize(("change", "message"), PROBLEMS)
def test_report_that_proves_less_is_refused(change: Change, message: str) -> None:
    values = GOOD.model_dump(mode="json")
    change(values)
    with pytest.raises(ReportError, match=f"(?s)mine.json.*{message}"):
        verify_reports({"mine.json": Report.model_validate(values)})


def test_tampered_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_report(GOOD, path)
    command = ["report", "--verify", str(path)]
    assert CliRunner().invoke(build_app(), command).exit_code == 0
    path.write_text(path.read_text().replace('"error": 1e-06', '"error": 1e-08', 1))
    result = CliRunner().invoke(build_app(), command)
    assert isinstance(result.exception, ReportError) and "was changed after it was written" in str(
        result.exception
    )


SERVER = "pytest --server=http://127.0.0.1:1 --pyargs core_rl_conformance"
OTHER_KIND = CHECKS[0].model_copy(update={"identifier": "T1.value", "kind": "trainer"})


def test_checks_of_other_kinds_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "load_checks", lambda: {c.identifier: c for c in (*CHECKS, OTHER_KIND)})
    assert shortcomings(GOOD) == []


@pytest.mark.parametrize(("kind", "reasons"), [("inference", 0), ("train", 1)])
def test_server_is_named_by_its_address(kind: str, reasons: int) -> None:
    engine = GOOD.engines[0].model_copy(update={"kind": kind})
    served = GOOD.model_copy(update={"engines": (engine,), "command": SERVER})
    assert sum("does not name the engine" in text for text in shortcomings(served)) == reasons


def _with(*names: str, **changes: Any) -> Report:
    """A report that certifies capabilities of these ``names``."""
    return report(case(capabilities=names), case("I10.value"), declared=names, **changes)


@pytest.mark.parametrize("profile", PROFILES)
def test_profile_needs_all_of_its_capabilities(profile: str) -> None:
    needed = sorted(PROFILES[profile]["train"])
    assert lacking(_with(*needed).engines[0], profile) == []
    (reason,) = lacking(_with(*needed[1:]).engines[0], profile)
    assert reason == f"{needed[0]} is not declared"
    failed = _with(*needed, problems=("gap",)).engines[0]
    assert lacking(failed, profile) == ["the verdict is failed"]


MOE = sorted(PROFILES["moe"]["train"])


@pytest.mark.parametrize(
    ("days", "badged", "words", "color"),
    [
        (0, _with(*MOE), ">certified", "#2e7d32"),
        (30, _with(), ">not certified", "#c62828"),
        (31, _with(*MOE), ">certified", "#757575"),
        (0, _with(*MOE, complete=False), ">not verified", "#757575"),
        (0, _with(*MOE).model_copy(update={"suite_version": "0.0.1"}), ">not verified", "#757575"),
    ],
)
def test_badge_shows_state_version_and_date(days: int, badged: Report, words: str, color: str) -> None:
    text = badge(badged, badged.engines[0], "moe", NOON + timedelta(days=days))
    assert ET.fromstring(text).tag.endswith("svg")
    assert f"{words} 0.1.0, 2026-01-02" in text and color in text


@pytest.mark.parametrize(
    ("reports", "profile", "message"),
    [
        ([GOOD], "everything", "no profile 'everything'; there are sft"),
        ([GOOD, GOOD], "sft", "name a report of one engine"),
        ([EVERYTHING], "sft", "the reports have mine, other"),
    ],
)
def test_unknown_profile_or_engine_has_no_badge(reports: list[Report], profile: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        badge_of(reports, profile)
