"""Curves of training runs: the curves of an engine, and the spread that rounding alone gives the reference engine.

A synchronous run is a function of its recipe, so two engines differ in rounding alone; but Adam divides small
gradients by themselves, and a sampled token may flip, so that rounding grows from step to step. How far is measured:
the same recipe from weights that were moved by one unit in the last place.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from core_rl_oracle.plain import nudged
from core_rl_oracle.tolerance import FLOOR_ULPS, Tolerance
from core_rl_trainer import train
from core_rl_trainer.logs.metrics_log import read_steps

COMPARED = (
    "reward", "reward_std", "completion_tokens", "groups_without_signal", "loss", "policy_loss", "approx_kl",
    "entropy", "entropy_estimate",
    "clip_fraction", "kl_before", "kl_coef", "kl_k3", "grad_norm", "updates", "update_successful", "lr", "version",
    "critic_value_loss", "critic_explained_variance", "critic_grad_norm", "critic_updates",
    "eval_reward", "eval_reward_greedy", "eval_loss",
)  # fmt: skip
"""Metrics that two engines share; what depends on the clock and the mismatch, which is rounding itself, are not."""
FLOAT32_EPS = 2.0**-23

Curve = list[dict[str, float]]
"""The metrics of each step, from step 0."""


def curve_of(recipe: Path, overrides: Sequence[str], output: Path) -> Curve:
    """Run ``recipe`` into ``output``; its curve."""
    train(recipe, [*overrides, f"output_dir={output}"], console=Console(file=io.StringIO()))
    rows = read_steps(output / "metrics.jsonl")
    return [{name: value for name in COMPARED if (value := row.get(name)) is not None} for row in rows]


def move_weights(model: Path, moved: Path, seed: int) -> Path:
    """Copy the model directory to ``moved`` with each float32 weight moved by one unit in the last place."""
    shutil.copytree(model, moved)
    weights = moved / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: nudged(tensor, generator) for name, tensor in sorted(load_file(weights).items())}
    save_file(tensors, weights, metadata={"format": "pt"})
    return moved


class Spread:
    """The allowed distance of each metric of each step from ``base``, given the curves of runs from ``moved`` weights.

    The baseline of a step is the largest difference up to it, since the difference grows and a single one
    may be luckily small; the rule is that of `core_rl_oracle.tolerance`.
    """

    def __init__(self, base: Curve, moved: Sequence[Curve]) -> None:
        self._base = base
        self._limits: list[dict[str, Tolerance]] = []
        largest: dict[str, float] = {}
        for step, row in enumerate(base):
            for name, value in row.items():
                difference = max(abs(curve[step][name] - value) for curve in moved)
                largest[name] = max(difference, largest.get(name, 0.0))
            self._limits.append({name: self._tolerance(name, largest[name]) for name in row})

    def _tolerance(self, name: str, baseline: float) -> Tolerance:
        scale = max(abs(row[name]) for row in self._base if name in row)
        return Tolerance(baseline=baseline, floor=FLOOR_ULPS * FLOAT32_EPS * scale)

    def violations(self, curve: Curve) -> list[str]:
        """Each value outside, with step, metric, both values and the limit."""
        if len(curve) != len(self._base):
            return [f"{len(curve) - 1} steps instead of {len(self._base) - 1}"]
        messages = []
        for step, (row, base, limits) in enumerate(zip(curve, self._base, self._limits, strict=True)):
            if row.keys() != base.keys():
                messages.append(f"step {step}: only one of both has {sorted(row.keys() ^ base.keys())}")
            for name in sorted(row.keys() & base.keys()):
                error = abs(row[name] - base[name])
                if not limits[name].allows(error):
                    messages.append(
                        f"step {step}: {name} = {row[name]:.9g} instead of {base[name]:.9g}, a difference of "
                        f"{error:.1e}; allowed is {limits[name]}"
                    )
        return messages

    def shares(self, curve: Curve) -> Mapping[str, float]:
        """For each metric the largest difference over the steps as a part of the tolerance."""
        shares: dict[str, float] = {}
        for row, base, limits in zip(curve, self._base, self._limits, strict=True):
            for name in row.keys() & base.keys():
                limit = limits[name].limit
                error = abs(row[name] - base[name])
                part = error / limit if limit else float(error > 0)
                shares[name] = max(shares.get(name, 0.0), part)
        return shares
