"""docs/field.md, from the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core_rl_conformance.report.scoreboard import table_lines
from field.frameworks import FRAMEWORKS
from field.result import ROOT, Result, State

PAGE = ROOT / "docs" / "field.md"
ORDER = (State.WRONG, State.REFUSED, State.RIGHT, State.NOT_RUN)
"""A cell of several cases shows the first of these states that any has."""
SHOWN = {State.RIGHT: "right", State.WRONG: "**wrong**", State.REFUSED: "refused", State.NOT_RUN: "not run"}
INTRODUCTION = """\
# One check, many frameworks

Released versions of several frameworks under the same measurements, on a CPU. The page is written by `nox -s field`,
which installs each framework in an environment of its own; `-- --row NAME` measures one row. The figures are in
[field.json](results/field.json), or, for checks of the suite, in the
[reports of trainers](certify-a-trainer.md#results).

*Refused* means that the framework raised an error in place of a wrong number. *Not run* is no score.
"""


def text(results: Sequence[Result], descriptions: Mapping[str, str]) -> str:
    """A table of all rows, and a section for each with its cases."""
    parts = [INTRODUCTION, *_overview(results, descriptions)]
    for title, description in descriptions.items():
        rows = [
            part for name in FRAMEWORKS for part in results if (part.row, part.framework) == (title, name)
        ]
        parts += ["", f"## {title[0].upper()}{title[1:]}", "", description, "", *_cases(rows)]
        commands = dict.fromkeys(result.command for result in rows if result.command)
        parts += ["", "Commands: " + "; ".join(f"`{command}`" for command in commands) + "."]
    return "\n".join(parts) + "\n"


def _overview(results: Sequence[Result], titles: Iterable[str]) -> list[str]:
    versions = {part.framework: part.version for part in results if part.version}
    rows = [["", *(f"{name} {versions.get(name, '')}".strip() for name in FRAMEWORKS)]]
    for title in titles:
        cells = [
            _worst([part for part in results if (part.row, part.framework) == (title, name)])
            for name in FRAMEWORKS
        ]
        rows.append([f"[{title}](#{title.replace(' ', '-')})", *cells])
    return _table(rows)


def _worst(results: Sequence[Result]) -> str:
    """The state of several cases, with the largest error."""
    state = next((state for state in ORDER if any(part.state is state for part in results)), State.NOT_RUN)
    alike = [part for part in results if part.state is state and part.error is not None]
    worst = max(alike, key=lambda part: part.error or 0.0, default=None)
    if state is not State.WRONG or worst is None:
        return SHOWN[state]
    return f"{SHOWN[state]} {_number(worst.error)} {worst.unit} ({worst.case})"


def _cases(results: Iterable[Result]) -> list[str]:
    rows = [["framework", "case", "result", "error", "limit", "remark"]]
    for part in results:
        unknown = f"at most {_number(part.limit)}" if part.state is State.RIGHT else "-"
        error = unknown if part.error is None else _number(part.error)
        rows.append(
            [
                f"{part.framework} {part.version}".strip(),
                part.case,
                SHOWN[part.state],
                f"{error} {part.unit}" if part.limit is not None else "-",
                _number(part.limit),
                part.reason,
            ]
        )
    return _table(rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *others = rows
    return table_lines([header, ["---"] * len(header), *others])
