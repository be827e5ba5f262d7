"""Several reports as one table of engines, in Markdown for a README or as an HTML page, or of environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from core_rl_conformance.outcomes import CaseRecord, Outcome, worst_of
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.html import capability_rows, render
from core_rl_conformance.report.model import (
    CapabilityRecord,
    CapabilityState,
    CheckRecord,
    EngineRecord,
    Report,
    Verdict,
)

SYMBOLS = {
    CapabilityState.CERTIFIED: "✅",
    CapabilityState.NOT_CERTIFIED: "❌",
    CapabilityState.UNCERTIFIED: "○",
    Verdict.PASSED: "✅",
    Verdict.PARTIAL: "○",
    Verdict.FAILED: "❌",
    Verdict.NOT_RUN: "○",
}
PACKAGES = ("torch", "transformers", "pydantic", "peft", "megatron-core", "torchtitan", "mindspore")
"""Packages with a column."""
HEAD = """\
# Support

The quick form of the suite (one layout of two ranks) with several versions of its dependencies, from the reports in
`docs/results/versions`. `nox -s versions` writes reports, and `core-rl report docs/results/versions/*.json --versions
docs/support.md` this page; a report of a server has the server's version in its name. The last column has the
comparison with the largest error in relation to its limit.
"""
LEGEND = (
    "✅ certified: every check that needs it ran and passed · ❌ a check failed · "
    "○ not all of its checks were run · - not declared"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The code of one engine under one suite, with the results of all reports about it."""

    engine: EngineRecord
    cases: Sequence[CaseRecord]
    reports: Sequence[Report]
    """Oldest first."""

    @property
    def version(self) -> str:
        """Name and version, which several codes may share."""
        return f"{self.engine.name} {self.engine.version}".removesuffix(" -")

    @property
    def suite(self) -> str:
        """Version and code of the suite."""
        return f"{self.reports[-1].suite_version} {self.reports[-1].suite_code.short}"

    @property
    def extent(self) -> str:
        """The parts of the suite that the reports are about, such as ``quick``."""
        return " and ".join(dict.fromkeys(report.extent for report in self.reports))

    @property
    def checks_passed(self) -> str:
        """The number of checks that passed in all their cases, of all that ran."""
        executed: dict[str, bool] = {}
        for case in self.cases:
            if case.outcome.executed:
                executed[case.check] = executed.get(case.check, True) and case.outcome is Outcome.PASSED
        return f"{sum(executed.values())} of {len(executed)}"


@dataclass(frozen=True, kw_only=True)
class Scoreboard:
    """Engines side by side."""

    entries: Sequence[Entry]

    @property
    def titles(self) -> list[str]:
        """A title for each entry: name and version, with the code where the version has several."""
        shared = self.ambiguous
        return [
            f"{entry.version} {entry.engine.code.digest[:8]}" if entry.version in shared else entry.version
            for entry in self.entries
        ]

    @property
    def ambiguous(self) -> list[str]:
        """Names and versions under which the reports have several codes of the engine or the suite."""
        counts = Counter(entry.version for entry in self.entries)
        return [version for version, count in counts.items() if count > 1]

    @property
    def warnings(self) -> list[str]:
        """A sentence for each version with several codes."""
        return [
            f"{version}: the reports are about different code of the engine or of the suite, and are not merged; "
            "run the suite again on one checkout for one verdict"
            for version in self.ambiguous
        ]

    @property
    def capabilities(self) -> dict[str, list[CapabilityRecord | None]]:
        """Capabilities that any of them declares, with the state in each."""
        return capability_rows([entry.engine for entry in self.entries])

    @property
    def checks(self) -> list[CheckRecord]:
        """Each check that has a result, as the newest report that has it describes it."""
        reports = sorted(
            (report for entry in self.entries for report in entry.reports), key=attrgetter("created")
        )
        known = {check.identifier: check for report in reports for check in report.checks}
        used = {case.check for entry in self.entries for case in entry.cases}
        return sorted((known[identifier] for identifier in used), key=lambda check: check.order)


def merge(reports: Iterable[Report]) -> Scoreboard:
    """One entry for each version and code of each engine under each code of the suite.

    Of several results for one case the newest counts, and an unexecuted result never replaces an executed result.
    """
    ordered = sorted(reports, key=attrgetter("created"))
    entries: dict[tuple[str, ...], list[tuple[Report, EngineRecord]]] = {}
    for report in ordered:
        for engine in report.engines:
            codes = (engine.code.digest, report.suite_code.digest)
            key = (engine.name, engine.distribution, engine.version, *codes)
            entries.setdefault(key, []).append((report, engine))
    return Scoreboard(entries=[_entry(entries[key]) for key in sorted(entries)])


def _entry(sources: Sequence[tuple[Report, EngineRecord]]) -> Entry:
    newest = sources[-1][1]
    cases = _newest_cases(report.cases(newest.name) for report, _ in sources)
    complete = [engine for report, engine in sources if report.complete]
    problems = complete[-1].problems if complete else newest.problems
    declared = [capability.name for capability in newest.capabilities]
    engine = newest.model_copy(
        update={
            "capabilities": certify(declared, cases, needs_of(sources[-1][0].checks, newest.kind)),
            "verdict": judge(cases, problems, complete=bool(complete)),
            "problems": problems,
        }
    )
    return Entry(engine=engine, cases=cases, reports=[report for report, _ in sources])


def _newest_cases(reports: Iterable[Sequence[CaseRecord]]) -> list[CaseRecord]:
    """Oldest first goes in. A check that ran somewhere was not run nowhere."""
    newest: dict[tuple[object, ...], CaseRecord] = {}
    for cases in reports:
        for case in cases:
            # Capabilities separate a case on a GPU from the same case on a CPU.
            place = (case.layout, case.model, case.dtype, case.seed)
            key = (case.label, *place, case.capabilities)
            if case.outcome.executed or key not in newest:
                newest[key] = case
    ran = {case.label for case in newest.values() if case.outcome.executed}
    return [case for case in newest.values() if case.outcome.executed or case.label not in ran]


def markdown(board: Scoreboard) -> str:
    """A table for a README: a column for each engine, a row for each capability."""
    entries = board.entries
    rows = [
        ["", *board.titles],
        ["---", *("---" for _ in entries)],
        ["verdict", *(f"{SYMBOLS[entry.engine.verdict]} {entry.engine.verdict}" for entry in entries)],
        ["checks passed", *(entry.checks_passed for entry in entries)],
        ["cases", *(str(len(entry.cases)) for entry in entries)],
        ["code", *(entry.engine.code.short for entry in entries)],
        ["suite", *(entry.suite for entry in entries)],
        ["session", *(entry.extent for entry in entries)],
        ["date", *(f"{entry.reports[-1].created:%Y-%m-%d}" for entry in entries)],
    ]
    rows += [
        [f"`{name}`", *("-" if cell is None else SYMBOLS[cell.state] for cell in cells)]
        for name, cells in board.capabilities.items()
    ]
    lines = [*table_lines(rows), "", LEGEND, *(f"\n{warning}" for warning in board.warnings), ""]
    pairs = list(_pair_rows(board))
    if pairs:
        header = ["pair", "cases passed", "models", "dtypes", "closest to its limit"]
        lines += [*table_lines([header, ["---"] * len(header), *pairs]), ""]
    return "\n".join(lines)


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, whose first two rows are header and rule."""
    return ["| " + " | ".join(part.replace("|", "\\|") for part in row) + " |" for row in rows]


def _pair_rows(board: Scoreboard) -> Iterator[list[str]]:
    for title, entry in zip(board.titles, board.entries, strict=True):
        executed = [case for case in entry.cases if case.partner and case.outcome.executed]
        for partner in dict.fromkeys(case.partner for case in executed):
            cases = [case for case in executed if case.partner == partner]
            models, dtypes = (
                ", ".join(sorted({getattr(case, n) for case in cases})) for n in ("model", "dtype")
            )
            yield [f"{title} with {partner}", _passed(cases), models, dtypes, _limit(cases, ": {}")]


def _passed(executed: Sequence[CaseRecord]) -> str:
    return f"{sum(case.outcome is Outcome.PASSED for case in executed)} of {len(executed)}"


def _limit(cases: Sequence[CaseRecord], quantity: str = "") -> str:
    """The error that is closest to its limit, with the compared ``quantity`` where that is a form for its name."""
    if (closest := worst_of(cases)) is None:
        return "-"
    worst, case = closest
    return f"{worst.error:.1e} of {worst.limit:.1e}{quantity.format(worst.what)} (`{case.check}`)"


def scoreboard_page(board: Scoreboard) -> str:
    """The same as an HTML page, with the outcomes of each check."""
    return render("scoreboard.html.jinja", {"board": board})


def versions_page(reports: Mapping[str, Report]) -> str:
    """A page with a row for each of ``reports``, by the names of their environments, and engine."""
    header = ["environment", "engine", "Python", *PACKAGES, "verdict", "cases", "closest to its limit"]
    rows = []
    for name, report in reports.items():
        packages = [report.environment.packages.get(package) or "-" for package in PACKAGES]
        python = report.environment.python.rpartition(" ")[2]
        for engine in report.engines:
            executed = [case for case in report.cases(engine.name) if case.outcome.executed]
            verdict = [str(engine.verdict), _passed(executed), _limit(executed)]
            rows.append([f"`{name}`", f"`{engine.name}`", python, *packages, *verdict])
    return "\n".join([HEAD, *table_lines([header, ["---"] * len(header), *rows])]) + "\n"
