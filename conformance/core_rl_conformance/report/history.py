"""Every check by target and version, as Markdown: failures of a single package first, and what earlier versions did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from core_rl_conformance.catalogue import TargetKind
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.report.model import CheckRecord
from core_rl_conformance.report.scoreboard import Entry, Scoreboard, table_lines

SYMBOLS = {Outcome.FAILED: "❌", Outcome.WAIVED: "⚠️", Outcome.PASSED: "✅", Outcome.NOT_RUN: "not run"}
"""By outcome, the worst first; an outcome without a symbol is no score and is shown as a dash."""
LEGEND = (
    "✅ passed, with the number of cases · ❌ failed in 2 of 8 cases · ⚠️ failed, and waived as known · "
    "*not run*: left out by the command line or the machine, no score · - not supported. "
    "Checks that fail in one package only come first, then other failures. Earlier versions stand in parentheses, "
    "the newest first."
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """An engine or trainer with all of its versions."""

    entries: Sequence[Entry]
    """Newest first."""

    @property
    def name(self) -> str:
        """The same in all versions."""
        return self.entries[0].engine.name

    @property
    def kind(self) -> TargetKind:
        """Of the newest version."""
        return self.entries[0].engine.kind

    @property
    def package(self) -> str:
        """What is judged, where several targets are parts of it: the package named in the version, or the target."""
        return self.entries[0].engine.version.rpartition(" ")[0] or self.name

    def outcome(self, check: str) -> Outcome | None:
        """The worst of the newest version's cases; None where it has none."""
        return _worst(_cases(self.entries[0], check))

    def cell(self, check: str) -> str:
        """The state in the newest version, and the states in the earlier versions that have the check."""
        newest, *earlier = self.entries
        before = [
            f"{_state(_cases(entry, check))} in {entry.engine.version}"
            for entry in earlier
            if _cases(entry, check)
        ]
        return _state(_cases(newest, check)) + (f" ({'; '.join(before)})" if before else "")


def targets_of(board: Scoreboard) -> list[Target]:
    """The board's entries by name, the newest version first."""
    ordered = sorted(board.entries, key=lambda entry: entry.reports[-1].created, reverse=True)
    by_name = groupby(
        sorted(ordered, key=lambda entry: entry.engine.name), key=lambda entry: entry.engine.name
    )
    return [Target(entries=list(entries)) for _, entries in by_name]


def history_markdown(board: Scoreboard) -> str:
    """A table of versions, and a table of checks for each kind of target."""
    targets = targets_of(board)
    header = ["target", "version", "date", "verdict", "checks passed, of all that ran", "suite"]
    versions = [row for target in targets for row in _versions(target)]
    lines = ["# Scoreboard", "", *table_lines([header, ["---"] * len(header), *versions]), "", LEGEND]
    for kind in dict.fromkeys(target.kind for target in targets):
        alike = [target for target in targets if target.kind == kind]
        header = ["check", "fails only in", *(target.name for target in alike)]
        rows = _checks([check for check in board.checks if check.kind == kind], alike)
        lines += [
            "",
            f"## Checks of {kind} targets",
            "",
            *table_lines([header, ["---"] * len(header), *rows]),
        ]
    return "\n".join([*lines, *(f"\n{warning}" for warning in board.warnings), ""])


def _versions(target: Target) -> Iterator[list[str]]:
    for entry in target.entries:
        date = f"{entry.reports[-1].created:%Y-%m-%d}"
        waived = any(case.outcome is Outcome.WAIVED for case in entry.cases)
        verdict = f"{entry.engine.verdict}{', with waivers' if waived else ''}"
        yield [f"`{target.name}`", entry.engine.version, date, verdict, entry.checks_passed, entry.suite]


def _checks(checks: Sequence[CheckRecord], targets: Sequence[Target]) -> list[list[str]]:
    """A row for each check that has a case; failures of a single package first, then of several."""
    ranked = []
    for check in checks:
        failing = {target.package for target in targets if _failed(target.outcome(check.identifier))}
        only = f"`{min(failing)}`" if len(failing) == 1 else ""
        rank = (not only, not failing, check.order)
        ranked.append((rank, [f"`{check.identifier}`", only, *(t.cell(check.identifier) for t in targets)]))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _cases(entry: Entry, check: str) -> list[CaseRecord]:
    return [case for case in entry.cases if case.check == check]


def _worst(cases: Sequence[CaseRecord]) -> Outcome | None:
    return next((outcome for outcome in SYMBOLS if any(case.outcome is outcome for case in cases)), None)


def _failed(outcome: Outcome | None) -> bool:
    return outcome in (Outcome.FAILED, Outcome.WAIVED)


def _state(cases: Sequence[CaseRecord]) -> str:
    worst = _worst(cases)
    if worst is None:
        return "-"
    executed = sum(case.outcome.executed for case in cases)
    alike = sum(case.outcome is worst for case in cases)
    if not worst.executed:
        return SYMBOLS[worst]
    return (
        f"{SYMBOLS[worst]} {executed}"
        if worst is Outcome.PASSED
        else f"{SYMBOLS[worst]} {alike} of {executed}"
    )
