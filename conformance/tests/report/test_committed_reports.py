"""The committed results: the page lists the reports that verify, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from core_rl_conformance.report.certify import PROFILES
from core_rl_conformance.report.files import read_report
from core_rl_conformance.report.html import FRESH_FOR, badge
from core_rl_conformance.report.verify import shortcomings

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def _reports() -> dict[str, list[str]]:
    """Reasons against each committed report, by its path below the results."""
    files = [path for path in RESULTS.rglob("*.json") if "schema_version" in json.loads(path.read_text())]
    return {path.relative_to(RESULTS).as_posix(): shortcomings(read_report(path)) for path in files}


def test_page_lists_reports_that_verify() -> None:
    listing = (RESULTS / "index.md").read_text(encoding="utf-8").split("\n## ", 1)[0]
    listed = set(re.findall(r"\]\((\S+\.json)\)", listing))
    assert listed == {name for name, reasons in _reports().items() if not reasons}


def test_badges_in_colour_need_verified_reports() -> None:
    for name, reasons in _reports().items():
        report = read_report(RESULTS / name)
        for engine in report.engines if reasons else ():
            for profile, kinds in PROFILES.items():
                if engine.kind in kinds:
                    assert "not verified" in badge(report, engine, profile, report.created + FRESH_FOR)
