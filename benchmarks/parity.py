"""Fifty steps of the ``megatron`` and the ``fsdp`` engine on the same batches, over layouts and micro-batch counts.

    python benchmarks/parity.py [--steps 50] [--figure docs/figures/megatron-and-fsdp.svg]

Answers a question that users of verl left open (verl #4710: Megatron's gradient norm three times FSDP's on the same
data): prints the largest differences of losses and of gradient norms, and draws both runs (``pip install matplotlib``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from common.workload import MODEL, token_nll

from core_rl import EngineGroup, LossSpec, MicroBatchSpec
from core_rl.data.batch import SequenceBatch

VOCABULARY = 211
SHAPE = {
    **MODEL,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Run:
    """One training."""

    engine: str
    layout: Mapping[str, Any]
    count: int
    """Micro-batches of each step, on each data parallel rank."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For tables and the figure."""
        degrees = ", ".join(f"{name} {degree:d}" for name, degree in self.layout.items()) or "one rank"
        degrees = degrees.replace("sequence_parallel 1", "sequence parallel")
        options = "".join(f", {name.replace('_', ' ')}" for name in self.options)
        plural = "" if self.count == 1 else "es"
        return f"{self.engine}, {degrees}{options}, {self.count} micro-batch{plural}"


RUNS = (
    Run("fsdp", {}, 1),
    Run("fsdp", {"dp": 2}, 4),
    Run("megatron", {}, 1),
    Run("megatron", {}, 4),
    Run("megatron", {"dp": 2}, 2, {"distributed_optimizer": True}),
    Run("megatron", {"tp": 2, "sequence_parallel": True}, 4),
    Run("megatron", {"pp": 2}, 4, {"virtual_stages": 2}),
    Run("megatron", {"cp": 2}, 2),
)


def main() -> None:
    """Train all, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--figure", type=Path, help="where to draw, such as docs/figures/megatron-and-fsdp.svg"
    )
    arguments = parser.parse_args()
    curves = {run.name: train(run, arguments.steps) for run in track(RUNS, "training")}
    first = next(iter(curves.values()))
    table = Table(
        "run", "largest relative difference: loss", "gradient norm", title=f"{arguments.steps} steps"
    )
    for name, curve in curves.items():
        table.add_row(name, *(f"{max(values):.1e}" for values in differences(curve, first)))
    Console(width=120).print(table)
    if arguments.figure:
        draw(curves, arguments.figure)


def train(run: Run, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm before clipping of each step."""
    loss, cut = LossSpec(fn=token_nll), MicroBatchSpec(count=run.count)
    curve = []
    with EngineGroup(
        run.engine,
        model={"config": SHAPE},
        optimizer={"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-4, "max_grad_norm": 0.5},
        layout=run.layout,
        options=run.options,
        device="cpu",
    ) as group:
        for step in range(steps):
            metrics = group.train_batch(batch_of(step), loss, cut)
            curve.append((metrics["loss"], metrics["grad_norm"]))
    return curve


def batch_of(step: int) -> SequenceBatch:
    """Ragged sequences that can be learned: each token follows from its predecessor, but for some noise."""
    random = torch.Generator().manual_seed(step)
    rows = []
    for length in torch.randint(4, 32, (6,), generator=random).tolist():
        row = [int(torch.randint(0, VOCABULARY, (), generator=random))]
        for noise in torch.randint(0, 3, (length - 1,), generator=random).tolist():
            row.append((3 * row[-1] + noise) % VOCABULARY)
        rows.append(row)
    return SequenceBatch.from_sequences(rows)


def differences(curve: list[tuple[float, float]], first: list[tuple[float, float]]) -> list[list[float]]:
    """The relative differences of the losses, and of the norms, at each step."""
    pairs = list(zip(curve, first, strict=True))
    return [
        [abs(values[i] - reference[i]) / abs(reference[i]) for values, reference in pairs] for i in range(2)
    ]


def draw(curves: Mapping[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw both quantities over the steps, a line for each run, and the distance of the norms."""
    import matplotlib as mpl  # of its own: nothing else here needs it

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    first = next(iter(curves.values()))
    for number, (name, curve) in enumerate(curves.items()):
        width = 8.0 - number  # they lie on one another
        for index in range(2):
            axes[index].plot([point[index] for point in curve], label=name, linewidth=width)
        _, norms = differences(curve, first)
        axes[2].plot(norms, ".", color=axes[0].lines[-1].get_color())
    axes[2].set_yscale("log")
    axes[2].set_ylim(1e-9, 10)
    axes[2].axhline(2.0, color="black", linestyle=":")
    axes[2].annotate("three times the norm", (0, 2.3), fontsize=8)
    titles = ("loss", "gradient norm before clipping", "relative difference of the norm to the first run")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel("step")
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
