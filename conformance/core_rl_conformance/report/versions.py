"""The page of versions: a row for each report and engine, with the packages of its environment."""

from __future__ import annotations

from collections.abc import Mapping

from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.report.model import EngineRecord, Report
from core_rl_conformance.report.scoreboard import table_lines

PACKAGES = ("torch", "transformers", "pydantic", "peft", "megatron-core", "torchtitan")
"""Packages with a column."""
HEAD = """\
# Support

The quick form of the suite (one layout of two ranks) with several versions of its dependencies, from the reports in
`docs/results/versions`. `nox -s versions` writes reports, and `core-rl report docs/results/versions/*.json --versions
docs/support.md` this page; a report of a server has the server's version in its name. The last column has the
comparison with the largest error in relation to its limit.
"""


def versions_page(reports: Mapping[str, Report]) -> str:
    """The page for ``reports``, by the names of their environments."""
    header = ["environment", "engine", "Python", *PACKAGES, "verdict", "cases", "closest to its limit"]
    rows = [_row(name, report, engine) for name, report in reports.items() for engine in report.engines]
    return "\n".join([HEAD, *table_lines([header, ["---"] * len(header), *rows])]) + "\n"


def _row(name: str, report: Report, engine: EngineRecord) -> list[str]:
    executed = [case for case in report.cases(engine.name) if case.outcome.executed]
    passed = sum(case.outcome is Outcome.PASSED for case in executed)
    measured = [(case.worst, case.check) for case in executed if case.worst is not None]
    worst = max(measured, key=lambda pair: pair[0].ratio, default=None)
    limit = "-" if worst is None else f"{worst[0].error:.1e} of {worst[0].limit:.1e} (`{worst[1]}`)"
    environment = report.environment
    packages = [environment.packages.get(package) or "-" for package in PACKAGES]
    python = environment.python.rpartition(" ")[2]
    count = f"{passed} of {len(executed)}"
    return [f"`{name}`", f"`{engine.name}`", python, *packages, str(engine.verdict), count, limit]
