"""``core-rl export``: the model of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[Path, typer.Argument(help="The output_dir of a run.", metavar="RUN", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Fields of its recipe to change, dotted: device=cpu engines.fsdp.layout.dp=1",
            metavar="FIELD=VALUE",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The directory to write.", show_default=False)
    ] = None,
    kind: Annotated[
        Literal["hf", "adapter", "portable"],
        typer.Option(
            "--format",
            help="hf: the whole model; adapter: the adapter of model.lora alone; portable: weights and moments, for "
            "any engine and torch.distributed.checkpoint.",
        ),
    ] = "hf",
    step: Annotated[
        int | None, typer.Option("--step", help="The step of the checkpoint.", show_default="the newest")
    ] = None,
) -> None:
    """Write the model of a checkpoint of RUN, with its tokenizer.

    Example: core-rl export runs/my-run --format hf --step 100 --output exported
    """
    from core_rl.launch.process import start_fork_server

    start_fork_server()  # imports torch for the ranks while this process does so for itself
    from core_rl_trainer.export import export_checkpoint

    directory = output or Path(f"{run.name}-{kind}")
    done = export_checkpoint(run, kind, directory, step, overrides or [])
    typer.echo(f"{kind} of step {done}: {directory}")
