"""``gpu-report.json`` and the page next to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from core_rl.machine import describe_machine
from core_rl.pages.chart import page_environment
from core_rl_gpu.points import POINTS
from core_rl_gpu.runner import Outcome

__all__ = ["not_run", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
NAME = "gpu-report"


def not_run(reason: str) -> list[Outcome]:
    """All points, none of which ran."""
    return [
        Outcome(name=point.name, about=point.about, status="not run", seconds=0.0, message=reason)
        for point in POINTS
    ]


def write_report(directory: Path, outcomes: Sequence[Outcome], *, rehearsal: bool) -> Path:
    """Write both files; returns the page's."""
    counts = {status: sum(o.status == status for o in outcomes) for status in ("passed", "failed", "not run")}
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": rehearsal,
        "machine": asdict(describe_machine(["core-rl"])),
        "counts": counts,
        "points": [asdict(outcome) for outcome in outcomes],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n")
    page = directory / f"{NAME}.html"
    page.write_text(page_environment(TEMPLATES).get_template("report.html.jinja").render(content))
    return page
