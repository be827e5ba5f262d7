"""The kill matrix: which check kills which mutant, with which seeds. Light: a conftest imports it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table

PROPERTY = "kill"
"""The user property of a test report that holds a `Kill`."""
Outcome = Literal["killed", "killed for another reason", "survived"]
SYMBOLS: dict[Outcome, str] = {"killed": "x", "killed for another reason": "x?", "survived": "SURVIVED"}
WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Result of one check on one mutant, with one seed."""

    mutant: str
    issue: str
    check: str
    place: str
    """Layout and model."""
    seed: int
    outcome: Outcome
    intended: bool = True
    """Whether the check is intended for the mutant."""

    def to_property(self) -> tuple[str, str]:
        """User property, which survives the way from a pytest-xdist worker."""
        return PROPERTY, json.dumps(asdict(self))

    @staticmethod
    def from_properties(properties: Iterable[tuple[str, object]]) -> Iterator[Kill]:
        """Every kill among the user properties of a report."""
        for name, value in properties:
            if name == PROPERTY:
                yield Kill(**json.loads(str(value)))


@dataclass
class _Row:
    issue: str
    check: str = ""
    place: str = ""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)
    """Further checks that kill it, in the order in which they came."""


class KillMatrix:
    """Gathers kills; rows are mutants, columns are seeds."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._full = False

    def add(self, kill: Kill) -> None:
        """Take one result."""
        row = self._rows.setdefault(kill.mutant, _Row(issue=kill.issue))
        if kill.intended:
            row.check, row.place = kill.check, kill.place
            row.outcomes[kill.seed] = kill.outcome
            return
        self._full = True
        if kill.outcome != "survived":
            row.others[kill.check] = None

    @property
    def seeds(self) -> list[int]:
        """The seeds that there are results of."""
        return sorted({seed for row in self._rows.values() for seed in row.outcomes})

    @property
    def summary(self) -> str:
        """One line: how many were killed, by how many checks."""
        rows = self._rows.values()
        killed = sum(set(row.outcomes.values()) == {"killed"} for row in rows)
        seeds = ", ".join(map(str, self.seeds)) or "none"
        checks = len({row.check for row in rows if row.outcomes})
        return (
            f"{killed} of {len(rows)} mutants are killed with every seed ({seeds}) "
            f"by the check that is meant for them; {checks} checks kill at least one"
        )

    def text(self) -> str:
        """The table for a terminal."""
        table = Table(*self._head(), box=None, pad_edge=False)
        for cells in self._cells():
            table.add_row(*cells)
        console = Console(file=StringIO(), width=WIDTH, highlight=False, markup=False)
        with console.capture() as captured:
            console.print(table)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        return "\n".join([*lines, self.summary, ""])

    def markdown(self) -> str:
        """The same for a page."""
        head = self._head()
        rows = [head, ["---"] * len(head), *self._cells()]
        lines = ["| " + " | ".join(cells) + " |" for cells in rows]
        return "\n".join(["# Kill matrix", "", self.summary + ".", "", *lines, ""])

    def _head(self) -> list[str]:
        seeds = [f"seed {seed}" for seed in self.seeds]
        return ["mutant", "issue", "where", "check that is meant for it", *seeds] + [
            "also killed by"
        ] * self._full

    def _cells(self) -> Iterator[Sequence[str]]:
        """Sorted by check, so that a reader sees what proves each of them."""
        for name, row in sorted(self._rows.items(), key=lambda item: (_natural(item[1].check), item[0])):
            outcomes = [SYMBOLS[row.outcomes[seed]] if seed in row.outcomes else "" for seed in self.seeds]
            extra = [", ".join(row.others)] * self._full
            yield [name, row.issue, row.place, row.check, *outcomes, *extra]


def _natural(check: str) -> tuple[int, str]:
    """``I2.x`` before ``I10.x``, and rules of the interface at the end."""
    invariant, _, name = check.partition(".")
    return (int(invariant[1:]) if invariant[1:].isdigit() else 1000, name)
