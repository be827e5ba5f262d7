"""Measure a framework in this environment: ``python -m field FRAMEWORK [--row NAME]``; without one, write the page.

Each row runs in a process of its own. Results go to docs/results/field.json, and docs/field.md is written from it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from field import from_reports
from field.frameworks import FRAMEWORKS
from field.page import PAGE, text
from field.result import Result, State, read, write
from field.rows import ROWS, measured

TIMEOUT_S = 280
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Variables of a rank alone, which frameworks read; the store takes any free port."""


def _in_process(framework: str, name: str) -> list[Result]:
    row, selected = ROWS[name], FRAMEWORKS[framework]
    peer = selected.open()
    named = {
        "framework": framework,
        "version": version(selected.distribution),
        "command": f'nox -s "field({framework})" -- --row {name}',
    }
    return [measured(row, case, peer, named) for case in row.cases]


def _in_child(framework: str, name: str) -> list[Result]:
    """The results of a process of its own; a row whose process dies has not run."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results.json"
        command = [sys.executable, "-m", "field", framework, "--row", name, "--out", str(file)]
        try:
            subprocess.run(command, env=os.environ | ALONE, check=True, timeout=TIMEOUT_S)
            return read(file)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = f"the process ended without a result: {type(error).__name__}"
    return [
        Result(
            row=ROWS[name].title,
            case=case,
            framework=framework,
            version=version(FRAMEWORKS[framework].distribution),
            state=State.NOT_RUN,
            reason=reason,
            command=f'nox -s "field({framework})" -- --row {name}',
        )
        for case in ROWS[name].cases
    ]


def current_page() -> str:
    """The page of the committed results and reports."""
    descriptions = {row.title: row.description for row in ROWS.values()} | from_reports.DESCRIPTIONS
    return text([*read(), *from_reports.results()], descriptions)


def main(arguments: Sequence[str]) -> None:
    """Run the rows that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m field", description=__doc__)
    parser.add_argument("framework", nargs="?", choices=FRAMEWORKS)
    parser.add_argument("--row", action="append", choices=ROWS, help="all by default")
    parser.add_argument("--out", type=Path, help="measure in this process, and write the results here alone")
    options = parser.parse_args(arguments)
    names = options.row or list(ROWS)
    if options.framework and options.out:
        write([result for name in names for result in _in_process(options.framework, name)], options.out)
        return
    results = read()
    for name in names if options.framework else ():
        replaced = (options.framework, ROWS[name].title)
        results = [result for result in results if (result.framework, result.row) != replaced]
        results += _in_child(options.framework, name)
        write(results)
    PAGE.write_text(current_page())


if __name__ == "__main__":
    main(sys.argv[1:])
