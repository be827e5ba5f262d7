"""Commands of the conformance package, in the entry-point group ``core_rl_commands``.

Importing this imports nothing heavy: ``core-rl --help`` does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["checks", "new_engine", "report"]


def checks(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checks, or how their names begin, such as I7; all without.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write all of them as a page here.", show_default=False)
    ] = None,
) -> None:
    """Explain the checks of the conformance suite: requirements, reasons, and where to look when it fails.

    Example: core-rl checks I7.logprobs
    """
    from core_rl_conformance import handbook

    known = {check.identifier: check for check in handbook.described_checks()}
    if markdown is not None:
        from core_rl_conformance.report.files import write_text

        write_text(markdown, handbook.checks_page(known.values()))
        return
    selected = handbook.select_checks(known, names or [])
    if names:
        typer.echo("\n\n".join(map(handbook.text_of, selected)))
        return
    width = max(len(check.identifier) for check in selected)
    for check in selected:
        typer.echo(f"{check.identifier.ljust(width)}  {check.title}")


def _print_schema(enabled: bool) -> None:
    if enabled:
        from core_rl_conformance.report.files import SCHEMA_FILE

        typer.echo(SCHEMA_FILE.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


def report(
    reports: Annotated[
        list[Path],
        typer.Argument(help="Files that pytest --report=FILE wrote.", metavar="REPORT", show_default=False),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the table here, for a README.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a web page here.", show_default=False)
    ] = None,
    _schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON schema of a report, and stop.",
        ),
    ] = False,
) -> None:
    """Merge conformance reports into one scoreboard of engines, and print it as Markdown or write it.

    Of several results for one case of one engine's code, the newest counts. Reports about different code of the
    engine or of the suite stand in columns of their own.

    Example: core-rl report fsdp.json mine.json --html scoreboard.html
    """
    from core_rl_conformance.report import scoreboard
    from core_rl_conformance.report.files import read_reports, write_text

    board = scoreboard.merge(read_reports(reports))
    if markdown is not None:
        write_text(markdown, scoreboard.markdown(board))
    if html is not None:
        write_text(html, scoreboard.scoreboard_page(board))
    if markdown is None and html is None:
        typer.echo(scoreboard.markdown(board), nl=False)


def new_engine(
    name: Annotated[
        str, typer.Argument(help="The engine's name: lower-case letters, digits and hyphens.", metavar="NAME")
    ],
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="Write the folder core-rl-NAME in here.", show_default=False),
    ] = None,
    class_prefix: Annotated[
        str | None,
        typer.Option(
            "--class-prefix",
            help="What its classes begin with, instead of NAME in CapWords.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a new engine: a distribution with a data-parallel engine that works, its tests, and its profile.

    Change it into yours, step by step, and keep the conformance suite green.

    Example: core-rl new-engine mine
    """
    from core_rl_conformance.skeleton.write import Skeleton, write_skeleton

    skeleton = Skeleton.named(name, class_prefix)
    place = (directory or Path()) / skeleton.distribution
    for path in write_skeleton(skeleton, place):
        typer.echo(f"wrote {path}")
    typer.echo(
        f'\nNext: pip install -e "{place}[test]"\n'
        f"      core-rl engines show {name}\n"
        f"      pytest --engine={name} --pyargs core_rl_conformance --quick"
    )
