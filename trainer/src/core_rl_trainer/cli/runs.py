"""``core-rl runs``: list runs, and compare two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from core_rl_trainer.logs.listing import RunSummary

DIFF = "diff"


def runs(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A directory, by default this one; or 'diff' and the directories of two runs.",
            metavar="[DIR | diff A B]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the runs, or the differences, as JSON.")
    ] = False,
) -> None:
    """List the runs below DIR with state, date, step, reward or loss, evaluation, and the command that continues each.

    'diff A B' prints the fields in which two runs differ and the newest metrics of both.

    Example: core-rl runs diff runs/sums-seed0 runs/sums-seed1
    """
    from core_rl.errors import ConfigError

    words = arguments or ["."]
    if words[0] == DIFF and len(words) == 3:
        _diff(Path(words[1]), Path(words[2]), as_json)
    elif len(words) > 1 or words[0] == DIFF:
        raise ConfigError(
            f"runs {' '.join(words)}: write 'core-rl runs DIR', or 'core-rl runs diff A B' with two runs"
        )
    else:
        _list(Path(words[0]), as_json)


def _list(root: Path, as_json: bool) -> None:
    from core_rl.errors import ConfigError
    from core_rl_trainer.logs.listing import find_runs, read_run

    summaries: list[RunSummary] = []
    for path in find_runs(root):
        try:
            summaries.append(read_run(path))
        except ConfigError as error:
            typer.secho(f"warning: {error}", err=True)
    if as_json:
        typer.echo(json.dumps([_plain(run) for run in summaries], indent=2))
    elif summaries:
        _print(summaries)
    else:
        typer.echo(
            f"There are no runs below {root}; a run is a directory that 'core-rl train' wrote (output_dir)."
        )


def _plain(run: RunSummary) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(run) | {"path": str(run.path)}


def _print(summaries: Sequence[RunSummary]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("run", "state", box=None, padding=(0, 2, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("newest")
    table.add_column("evaluation")
    table.add_column("updated (UTC)")
    for run in summaries:
        newest = _metric(run.metric, run.value)
        evaluation = _metric(run.evaluation, run.evaluation_value)
        updated = run.updated[:16] if run.updated else "-"
        table.add_row(
            escape(str(run.path)), run.state, f"{run.step}/{run.steps}", newest, evaluation, updated
        )
    console = Console()
    console.print(table)
    for run in summaries:
        if run.state in ("stopped", "interrupted"):
            reason = f": {run.reason.splitlines()[0]}" if run.reason else ""
            typer.echo(f"\n{run.path} {run.state}{reason}\n  {run.command}")
    if any(run.state == "complete" for run in summaries):
        typer.echo("\nA complete run continues with more steps: core-rl train RUN/recipe.yaml steps=N")


def _metric(name: str | None, value: float | None) -> str:
    if name is None:
        return "-"
    return f"{name} -" if value is None else f"{name} {value:.4g}"


def _diff(first: Path, second: Path, as_json: bool) -> None:
    from core_rl_trainer.logs.listing import differing_recipes, newest_metrics, read_run

    runs = read_run(first), read_run(second)
    fields, metrics = differing_recipes(*runs), newest_metrics(*runs)
    if as_json:
        typer.echo(json.dumps({"fields": fields, "metrics": metrics}, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("field or metric", escape(str(first)), escape(str(second)), box=None, padding=(0, 2, 0, 0))
    for field, values in fields.items():
        table.add_row(field, *(escape(repr(value)) for value in values))
    for name, newest in metrics.items():
        table.add_row(name, *("-" if value is None else f"{value:.4g}" for value in newest))
    Console().print(table)
