"""Steps, loads and exports at the size of Qwen2.5-0.5B on the CPU, against hand-written loops and against aims.

    python benchmarks/real_size.py
    python benchmarks/real_size.py --part step

The model has random weights and is made here: 494M of them, tied, saved in bfloat16. Parts: ``step`` and ``lora``,
one training step of the ``fsdp`` engine next to one written by hand; ``equal``, memory of two ranks; ``load`` and
``export``, of each rank in addition to its own. No two sides of a step are in memory at one time: fresh processes
alternate. Memory of ranks is anonymous memory, without the pages of mapped files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "core/tests"))

import torch
from common.measure import rounds, show, spread
from common.options import options, read
from common.real_memory import equal, export, load
from common.real_sides import QWEN2_5_0_5B, Cost, Line, steps_of
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {**QWEN2_5_0_5B, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024}
TINY = {"rounds": 1, "steps": 1, "model": None, "shape": SMALL}


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=2, help="that count, of each process; one more comes first"
    )
    parser.add_argument("--model", type=Path, help="a directory that keeps the model for the next run")
    parser.set_defaults(shape=QWEN2_5_0_5B)
    arguments = read(parser, TINY)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch:
        arguments.scratch = Path(scratch)
        arguments.model = make_model(arguments.model or arguments.scratch / "model", arguments.shape)
        for part in arguments.part or PARTS:
            lines += PARTS[part](arguments)
    columns = ("Qwen2.5-0.5B shape, bfloat16", "figure", "ratio", "aim", "met")
    table = Table(*columns, caption=f"torch {torch.__version__}, one thread for each rank")
    for line in lines:
        met = "yes" if line.value <= line.aim else "no"
        table.add_row(line.what, line.figure, f"{line.value:.3f}", f"at most {line.aim:g}", met)
    show(table)


def make_model(directory: Path, shape: Mapping[str, Any]) -> Path:
    """Save the model, unless it is there."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shape)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def _beside(label: str, engine: str, hand: str, arguments: argparse.Namespace) -> list[Line]:
    """Rounds of both sides; each round begins with the other one."""

    def cost(side: str) -> Cost:
        steps = steps_of(side, str(arguments.model), arguments.steps)
        Console(stderr=True).log(side, steps)
        return Cost(*map(statistics.median, zip(*map(astuple, steps), strict=True)))

    sides = {side: partial(cost, side) for side in (engine, hand)}
    costs = rounds(sides, repeats=arguments.rounds, warmup=0)
    figures: dict[str, Callable[[Cost], float]] = {
        "CPU seconds": lambda cost: cost.cpu_s,
        "seconds": lambda cost: cost.wall_s,
        "peak GiB": lambda cost: cost.peak / 2**30,
    }
    return [
        _compared(f"{label}, {name}", [*map(figure, costs[engine])], [*map(figure, costs[hand])])
        for name, figure in figures.items()
    ]


def _compared(label: str, ours: list[float], by_hand: list[float]) -> Line:
    ratio = statistics.median(a / b for a, b in zip(ours, by_hand, strict=True))
    return Line(label, f"{spread(ours)}; by hand {spread(by_hand)}", ratio, 1.05)


PARTS: dict[str, Callable[[argparse.Namespace], list[Line]]] = {
    "step": partial(_beside, "step", "engine", "by hand"),
    "lora": partial(_beside, "LoRA step", "engine, LoRA", "by hand, LoRA"),
    "equal": equal,
    "load": load,
    "export": export,
}


if __name__ == "__main__":
    main()
