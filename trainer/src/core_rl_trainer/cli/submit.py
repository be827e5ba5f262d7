"""``core-rl submit``: train on a Slurm cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def submit(
    recipe: Annotated[Path, typer.Argument(help="A YAML file.", metavar="RECIPE", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Fields to change, dotted: cluster.machines=2 cluster.scheduling.partition=gpu",
            metavar="FIELD=VALUE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Submit a job to Slurm that trains RECIPE, on the machines of its section 'cluster'.

    The recipe is checked first. The job runs 'core-rl train' from this directory; the same command again resumes.

    Example: core-rl submit recipe.yaml cluster.machines=2 cluster.ranks_per_machine=8
    """
    from core_rl_trainer.submission import submit as submit_job

    job, request = submit_job(recipe, overrides or [])
    machines = "1 machine" if request.machines == 1 else f"{request.machines} machines"
    memory = "" if not request.memory_mib else f", {request.memory_mib:,} MiB"
    typer.echo(f"job {job.number}: {machines} with {request.cpu} CPUs, {request.gpu} GPUs{memory} each")
    typer.echo(f"output: {job.log}")
    typer.echo(f"script: {job.script}")
