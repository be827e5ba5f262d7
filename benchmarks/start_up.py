"""Start-up of ``core-rl train`` on the quickstart, from the start of the process to the end of the first step.

    python examples/arithmetic/prepare.py
    git worktree add ../before COMMIT
    python benchmarks/start_up.py --before ../before

Both checkouts run in turn, without evaluations. ``engines, s`` is the part in which ranks start and build their models.
CPU seconds count all processes: the driver, the fork server and the ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from common.measure import rounds, spread
from common.process_cost import note_cpu_times

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "trainer/src", "cluster/src", "plugins/fsdp/src")
ENGINES = re.compile(r"building engines ([\d.]+) s")
LOOK_S = 0.02
"""Seconds between two looks for the end of the first step."""


@dataclass(frozen=True)
class StartUp:
    """Seconds of a run until its first step is done."""

    wall_s: float
    cpu_s: float
    engines_s: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--start", type=Path, default=Path("runs/arithmetic/start"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    checkouts = {"this checkout": ROOT} | ({"before": arguments.before} if arguments.before else {})
    sides = {
        name: lambda path=path: start_up(path.resolve(), arguments.start.resolve())
        for name, path in checkouts.items()
    }
    results = rounds(sides, repeats=arguments.repeats, warmup=0)
    caption = (
        f"median (quartiles) of {arguments.repeats} rounds; {os.cpu_count()} cores, torch {torch.__version__}"
    )
    table = Table(title="to the end of the first step", caption=caption)
    for column in ("", "wall, s", "CPU, s", "engines, s"):
        table.add_column(column, justify="right")
    for name, costs in results.items():
        table.add_row(name, *(spread(list(values)) for values in zip(*map(astuple, costs), strict=True)))
    Console(width=max(120, Console().width)).print(table)


def start_up(checkout: Path, start: Path) -> StartUp:
    """The seconds of one run of ``checkout``, which ends after its first step."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = os.pathsep.join(str(checkout / package) for package in PACKAGES)
    spent = dict[int, float]()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as messages:
        metrics = Path(scratch, "run", "metrics.jsonl")
        begin = time.perf_counter()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "core_rl.cli", "train", str(checkout / "examples/grpo_arithmetic.yaml")),
                *("steps=1", f"model.path={start / 'model'}", f"output_dir={metrics.parent}"),
                *(f"data.train={start / 'train.jsonl'}", "data.eval=null", "eval_samples=1"),
            ],
            env=env,
            stdout=messages,
            stderr=messages,
        )  # fmt: skip
        while process.poll() is None and not has_step(metrics):
            time.sleep(LOOK_S)
        wall_s = time.perf_counter() - begin
        note_cpu_times(process.pid, spent)
        process.wait()
        messages.seek(0)
        text = messages.read()
        if process.returncode:
            raise SystemExit(text)
    engines = ENGINES.search(text)
    assert engines is not None, text
    cost = StartUp(wall_s, sum(spent.values()), float(engines[1]))
    Console(stderr=True).log(checkout.name, cost)
    return cost


def has_step(metrics: Path) -> bool:
    """Whether the first step is in the file."""
    return metrics.is_file() and '"step": 1' in metrics.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
