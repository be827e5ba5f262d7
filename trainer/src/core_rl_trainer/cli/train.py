"""``core-rl train``: run a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from core_rl_trainer.recipe.recipe import Recipe


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
    """Train a model as RECIPE says.

    The same command again, after a crash or Ctrl-C, resumes from the last complete checkpoint. SIGTERM and SIGUSR1
    save one at the end of the step.

    Example: core-rl train examples/grpo_arithmetic.yaml engine=reference seed=1
    """
    from core_rl_trainer.plan.engine_config import check_recipe
    from core_rl_trainer.plan.preflight import preflight

    changes = overrides or []
    chosen = check_recipe(recipe, changes)  # before torch is imported, which takes seconds
    preflight(chosen)
    if dry_run:
        _print_plan(chosen, as_json)
        return

    from core_rl.launch.process import start_fork_server

    start_fork_server()  # imports torch for the ranks while this process does so for itself
    from core_rl.errors import SIGNAL_BASE, ExitCode
    from core_rl_trainer.api import run_recipe
    from core_rl_trainer.run.signals import EndedBySignal, resume_hint

    try:
        result = run_recipe(recipe, changes)
    except EndedBySignal as ended:
        typer.secho(f"{ended}; {resume_hint(chosen.directory)}", err=True)
        raise typer.Exit(SIGNAL_BASE + ended.number) from None
    except KeyboardInterrupt:
        typer.secho(f"interrupted; {resume_hint(chosen.directory)}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result))


def _print_plan(recipe: Recipe, as_json: bool) -> None:
    import dataclasses

    from core_rl_trainer.api import dry_run
    from core_rl_trainer.cli.plan import print_plan

    plan = dry_run(recipe)
    if as_json:
        values = {"recipe": recipe.model_dump(mode="json"), "plan": dataclasses.asdict(plan)}
        typer.echo(json.dumps(values, indent=2))
    else:
        print_plan(plan)
