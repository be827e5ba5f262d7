"""The picture of a run: the reward, or the loss, over the steps, and on the held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["plot_rewards"]

logger = logging.getLogger(__name__)

WINDOW = 5
"""Steps of the moving mean."""


def plot_rewards(rows: Sequence[Mapping[str, float | None]], path: Path, title: str) -> bool:
    """Draw ``reward`` and ``eval_reward`` of metric ``rows``, or ``loss`` where there are none, as a PNG.

    False where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "matplotlib is not installed, there is no picture of the rewards; pip install matplotlib"
        )
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot: no display, no global state
    axes = figure.subplots()
    drawn = "reward" if any("reward" in row for row in rows) else "loss"
    steps, rewards = _series(rows, drawn)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.3, label="training data, each step")
    axes.plot(steps, _moving_mean(rewards), color="tab:blue", label=f"the same, mean of {WINDOW} steps")
    for name, colour, label in (
        ("eval_reward", "tab:orange", "held-out prompts, sampled"),
        ("eval_reward_greedy", "tab:green", "held-out prompts, greedy"),
        ("eval_loss", "tab:orange", "held-out rows"),
    ):
        at, values = _series(rows, name)
        if not at:
            continue
        axes.plot(at, values, "o--", color=colour, label=label)
        for x, y in zip(at[:1] + at[1:][-1:], values[:1] + values[1:][-1:], strict=True):
            axes.annotate(f"{y:.3f}", (x, y), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(xlabel="step", ylabel=f"mean {drawn}", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
    return True


def _series(rows: Sequence[Mapping[str, float | None]], name: str) -> tuple[list[float], list[float]]:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step or 0 for step, _ in found], [value or 0.0 for _, value in found]


def _moving_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
