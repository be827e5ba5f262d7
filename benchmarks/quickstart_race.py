"""Seconds to a held-out reward on the task of a GRPO recipe: ``core-rl train``, and TRL's ``GRPOTrainer``.

    python examples/arithmetic/prepare.py
    python benchmarks/quickstart_race.py --output race.json
    python benchmarks/quickstart_race.py --recipe examples/smollm2/grpo_products.yaml --every 1 --seeds 0

Both sides start from the same weights and take the settings of the recipe, the quickstart's by default. Each run is a
process of its own that ends, its model saved, at the first evaluation with the reward; runs of both sides alternate.
``steps, s`` is the time of rollouts and updates (and weight syncs); ``process, s`` the wall time of the whole
process with imports, evaluations and saving, ``process, CPU s`` the CPU time of all its processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from common.measure import figures_table, show
from common.options import installed, options, read
from common.race_target import VARIABLE
from rich.console import Console

SIDES = ("core-rl", "TRL")
COMMON = Path(__file__).resolve().parent / "common"
POLL_S = 0.2
"""Seconds between two looks at the CPU times of a run's processes."""
TINY = {
    "fields": ["steps=1", "rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_new_tokens=4"],
    "seeds": [0],
    "every": 1,
    "target": math.nan,
}
"""No reward reaches the target, and none misses it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The cost of one run."""

    side: str
    seed: int
    start_reward: float
    end_reward: float
    steps: int
    steps_s: float
    process_s: float
    process_cpu_s: float


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("examples/grpo_arithmetic.yaml"))
    parser.add_argument("--target", type=float, default=0.6, help="mean reward of sampled completions")
    parser.add_argument("--every", type=int, default=5, help="training steps between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    parser.add_argument("--output", type=Path, help="a JSON file of all runs")
    parser.add_argument(
        "--fields", nargs="+", default=[], metavar="FIELD=VALUE", help="of the recipe, on both sides"
    )
    arguments = read(parser, TINY)
    if not installed("trl"):
        arguments.sides = ["core-rl"]
    runs: list[Run] = []
    for number, seed in enumerate(arguments.seeds):
        for side in arguments.sides[:: -1 if number % 2 else 1]:
            runs.append(race(side, seed, arguments))
            Console(stderr=True).log(runs[-1])
            if arguments.output is not None:
                text = json.dumps([asdict(run) for run in runs], indent=2)
                arguments.output.write_text(text, encoding="utf-8")
    report(runs, arguments.target)


def race(side: str, seed: int, arguments: argparse.Namespace) -> Run:
    """One run of one side."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "run")
        wall_s, cpu_s = measured(command(side, seed, output, arguments), arguments.target)
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["eval_reward"] for row in rows if "eval_reward" in row]
    if rewards[-1] < arguments.target:
        raise SystemExit(f"{side}, seed {seed}: the reward ends at {rewards[-1]:.3f}")
    times = [value for row in rows for name, value in row.items() if name.startswith("time_")]
    return Run(side=side, seed=seed, start_reward=rewards[0], end_reward=rewards[-1], steps=rows[-1]["step"],
               steps_s=sum(times), process_s=wall_s, process_cpu_s=cpu_s)  # fmt: skip


def command(side: str, seed: int, output: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of a run that writes ``metrics.jsonl`` to ``output``."""
    fields = [*arguments.fields, f"seed={seed}", f"output_dir={output}", f"eval_every={arguments.every}"]
    program = [str(COMMON / "race_trl.py")]
    if side == "core-rl":
        program = ["-m", "core_rl.cli", "train"]
        fields += [
            "eval_first=true",
            "save_every=1000000",
            f"callbacks=[{COMMON / 'race_target.py'}:stop_at_target]",
        ]
    return [sys.executable, *program, str(arguments.recipe), *fields]


def measured(arguments: Sequence[str], target: float) -> tuple[float, float]:
    """Wall and CPU seconds of a process with all its descendants."""
    # Each side takes the threads that it takes by itself.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    start, spent = time.perf_counter(), dict[int, float]()
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            arguments, env=env | {VARIABLE: str(target)}, stdout=messages, stderr=messages
        )
        while process.poll() is None:
            note_cpu_times(process.pid, spent)
            time.sleep(POLL_S)
        wall_s = time.perf_counter() - start
        if process.returncode:
            messages.seek(0)
            raise SystemExit(messages.read())
    return wall_s, sum(spent.values())


def note_cpu_times(pid: int, spent: dict[int, float]) -> None:
    """Set the CPU seconds of each living process of the tree; ended processes keep their last value."""
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            spent[process.pid] = times.user + times.system
    except psutil.NoSuchProcess:
        return  # ended meanwhile; the next look sees the others


def report(runs: Sequence[Run], target: float) -> None:
    """A table of all runs, and of the ratios of both sides."""
    title = f"{os.cpu_count()} CPU cores, held-out reward {target:g}"
    names = ("", "seed", "reward", "training steps", "steps, s", "process, s", "process, CPU s")
    table = figures_table(names, title=title, caption=f"torch {torch.__version__}")
    for run in runs:
        reward = f"{run.start_reward:.3f} to {run.end_reward:.3f}"
        seconds = [f"{value:.1f}" for value in (run.steps_s, run.process_s, run.process_cpu_s)]
        table.add_row(run.side, str(run.seed), reward, str(run.steps), *seconds)
    show(table)
    for name in ("steps", "steps_s", "process_s", "process_cpu_s"):
        ours, theirs = ({run.seed: getattr(run, name) for run in runs if run.side == side} for side in SIDES)
        if ours and theirs:
            ratios = [theirs[seed] / ours[seed] for seed in ours]
            Console(width=120).print(
                f"{name}: TRL / core-rl {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
