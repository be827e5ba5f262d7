"""Asynchronous against synchronous training of the quickstart: rewards that are reached, and seconds of a step.

    python examples/arithmetic/prepare.py
    python benchmarks/async_training.py

One run of ``examples/grpo_arithmetic.yaml`` for each bound on the age of the weights and each seed, all in one go.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core_rl_trainer import run_recipe
from core_rl_trainer.logs.step_log import read_steps

RECIPE = Path(__file__).parents[1] / "examples" / "grpo_arithmetic.yaml"
PHASES = ("time_rollout_s", "time_logprobs_s", "time_update_s", "time_sync_s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 1], help="max_head_offpolicyness of each run"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/async_training"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as steps=20")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    table = Table("bound", "seed", "held-out reward, sampled", "greedy", "s / step", "s waiting", "lag")
    for seed in arguments.seeds:
        for bound in arguments.bounds:
            chosen = [f"rollout.max_head_offpolicyness={bound}", f"seed={seed}", "fresh=true"]
            directory = f"output_dir={arguments.output}/{bound}-{seed}"
            result = run_recipe(RECIPE, [*chosen, directory, *arguments.overrides], console)
            table.add_row(str(bound), str(seed), *figures(result))
    console.print(table)


def figures(result: dict[str, Any]) -> Sequence[str]:
    """Rewards before and after; medians over the steps of their time, that of them spent waiting, and the lag."""
    rows = [row for row in read_steps(Path(result["metrics"])) if row["step"]]
    steps = [sum(row[name] or 0.0 for name in PHASES) for row in rows]
    waits, lags = ([row[name] or 0.0 for row in rows] for name in ("time_rollout_s", "staleness_mean"))
    before, after = result["before"], result["after"]
    rewards = [f"{before[name]:.3f} to {after[name]:.3f}" for name in ("eval_reward", "eval_reward_greedy")]
    return *rewards, *(f"{statistics.median(values):.2f}" for values in (steps, waits, lags))


if __name__ == "__main__":  # the engine's processes import this module again
    main()
