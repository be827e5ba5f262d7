"""Cost of the training loop around its engines: the part of a GRPO step in which none of them is at work.

    python benchmarks/loop_cost.py

A run as of ``core-rl train``, with ``fsdp`` on one rank and ``reference-rollout``. Both note when they work, each
in its own process; the rest of a step is the loop's: workflows and rewards, batches and advantages, metrics, and the
way of batches to the engine's process and back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import yaml
from common.bare import build
from common.busy import BUSY_FILE, busy_seconds, watch_rollouts
from common.measure import spread
from common.rollouts import given_rollout, word_tokenizer
from common.workload import MODEL
from rich.console import Console
from rich.table import Table

from core_rl import get_spec, register_engine
from core_rl_trainer import run_recipe
from core_rl_trainer.run.loop import TrainingLoop

ENGINE = "busy-fsdp"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="completions to each prompt")
    parser.add_argument("--tokens", type=int, default=120, help="the most tokens of a completion")
    arguments = parser.parse_args()
    register_engine(replace(get_spec("fsdp"), name=ENGINE, factory="common.busy:BusyFSDP"))
    watch_rollouts()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        os.environ[BUSY_FILE] = str(path / "busy")
        steps = watch_steps()
        run_recipe(write_recipe(path, arguments), [], Console(stderr=True))
        # The first step builds what later ones have.
        costs = [
            (end - start, end - start - busy_seconds(path / "busy", start, end)) for start, end in steps[1:]
        ]
    report(costs)


def watch_steps() -> list[tuple[float, float]]:
    """When each step of the runs to come began and ended, filled as they go."""
    steps: list[tuple[float, float]] = []
    step = TrainingLoop.step

    def watched(loop: TrainingLoop, number: int) -> dict[str, float]:
        start = time.monotonic()
        metrics = step(loop, number)
        steps.append((start, time.monotonic()))
        return metrics

    TrainingLoop.step = watched  # type: ignore[method-assign]
    return steps


def write_recipe(path: Path, arguments: argparse.Namespace) -> Path:
    """GRPO on random prompts, with the benchmarks' model and a tokenizer for it."""
    build(MODEL, packed=False).save_pretrained(path / "model")
    word_tokenizer().save_pretrained(path / "model")
    prompts = given_rollout(arguments.prompts, 1, 16).prompts
    rows = [{"prompt": " ".join(f"w{token}" for token in prompt), "answer": ""} for prompt in prompts]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (path / "reward.py").write_text(
        "def reward(completion, row):\n    return len(completion) % 7 / 7\n", encoding="utf-8"
    )
    rollout = {
        "prompts_per_step": arguments.prompts,
        "group_size": arguments.group,
        "max_new_tokens": arguments.tokens,
    }
    recipe: dict[str, Any] = {
        "engine": ENGINE,
        "model": {"path": str(path / "model")},
        "data": {"train": str(path / "rows.jsonl"), "eval": str(path / "rows.jsonl")},
        "reward": f"{path}/reward.py:reward",
        "rollout": rollout,
        "algorithm": {"type_": "grpo", "args": {"minibatches": 2}},
        "optimizer": {"lr": 1e-6},
        "micro_batch_tokens": 2048,
        "steps": arguments.steps + 1,
        "save_every": arguments.steps + 1,
        "device": "cpu",
        "output_dir": str(path / "run"),
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path / "recipe.yaml"


def report(costs: list[tuple[float, float]]) -> None:
    """Seconds of a step, and of them the loop's."""
    table = Table(title="the loop around the engines", caption=f"median (quartiles) of {len(costs)} steps")
    for column in ("a step, s", "without an engine at work, s", "% of the step"):
        table.add_column(column, justify="right")
    parts = [100 * own / total for total, own in costs]
    columns = ([total for total, _ in costs], [own for _, own in costs], parts)
    table.add_row(*(spread(values) for values in columns))
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
