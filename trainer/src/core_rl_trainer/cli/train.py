"""``core-rl train``: run a recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file.", metavar="RECIPE", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Fields to change, dotted: engine=reference optimizer.lr=1e-5 seed=3",
            metavar="FIELD=VALUE",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the recipe, print what the run would do and need, and stop."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result, or the plan, as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Train the model of RECIPE.

    The same command again, after a crash or Ctrl-C, resumes from the last complete checkpoint. SIGTERM and SIGUSR1
    save one at the end of the step.

    Example: core-rl train examples/grpo_arithmetic.yaml engine=reference seed=1
    """
    from core_rl_trainer.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        from core_rl_trainer.api import report_loaded
        from core_rl_trainer.cli.plan import print_plan

        report = report_loaded(loaded)
        if as_json:
            values = {"recipe": loaded.model_dump(mode="json"), "plan": asdict(report)}
            typer.echo(json.dumps(values, indent=2))
        else:
            print_plan(report)
        return

    from core_rl.errors import SIGNAL_BASE, ExitCode
    from core_rl.launch.process import start_fork_server
    from core_rl.registry.engines import get_spec
    from core_rl_trainer.api import train_loaded
    from core_rl_trainer.run.signals import EndedBySignal

    # Imports torch and the engine for the ranks while this process checks the recipe.
    start_fork_server(get_spec(loaded.engine).preload)
    try:
        result = train_loaded(loaded)
    except EndedBySignal as ended:
        _print_end(str(ended), loaded.directory, fresh=loaded.fresh)
        raise typer.Exit(SIGNAL_BASE + ended.number) from None
    except KeyboardInterrupt:
        _print_end("interrupted", loaded.directory, fresh=loaded.fresh)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result))


def _print_end(reason: str, directory: Path, *, fresh: bool) -> None:
    from core_rl_trainer.run.run_directory import resume_hint

    typer.secho(f"{reason}; {resume_hint(directory, fresh)}", err=True)
