"""``python -m core_rl_gpu``: run the points on the GPU, or ``--rehearse`` them on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from core_rl_gpu.points import POINTS
from core_rl_gpu.report import not_run, write_report
from core_rl_gpu.runner import Outcome, run_points

STYLES = {"passed": "green", "failed": "red", "not run": "blue"}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Points; by default all.")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="On the CPU, at tiny sizes.")] = False,
    out: Annotated[Path, typer.Option(help="The directory of the report and the logs.")] = Path("gpu-report"),
) -> None:
    """Run fifteen points in order, each with a time limit, and write gpu-report.json and a page.

    Ends with 1 where a point failed. Without a GPU nothing runs, and the report says so.
    """
    known = [point.name for point in POINTS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"no such point: {', '.join(unknown)}; there are {', '.join(known)}")
    console = Console()
    device: Literal["cpu", "cuda"] = "cpu" if rehearse else "cuda"
    outcomes: list[Outcome] = []
    if device == "cuda" and not torch.cuda.is_available():
        outcomes = not_run("torch sees no GPU; --rehearse runs all points on the CPU")
        console.print("no GPU: not run")
    else:
        chosen = [point for point in POINTS if not names or point.name in names]
        for outcome in run_points(chosen, device, out.resolve()):
            outcomes.append(outcome)
            first = outcome.message.partition("\n")[0]
            console.print(
                f"[{STYLES[outcome.status]}]{outcome.status:8}[/] {outcome.name:16} {outcome.seconds:6.1f} s  {first}"
            )
    console.print(f"report: {write_report(out, outcomes, rehearsal=rehearse)}", soft_wrap=True)
    sys.exit(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)
