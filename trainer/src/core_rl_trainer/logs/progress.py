"""The progress of a run: a bar on a terminal and in a notebook, some lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["TrainingProgress", "print_result"]

LINES = 10
"""The approximate number of lines that a run prints where there is no terminal."""


HELD_OUT = {
    "eval_reward": "mean reward, sampled",
    "eval_reward_greedy": "mean reward, greedy",
    "eval_loss": "loss",
    "eval_accuracy": "accuracy",
}
"""Metrics of an evaluation that are printed at the end of a run."""


class TrainingProgress(Progress):
    """Shows reward and a KL, or the loss, tokens per second and the time that is left."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[headline]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not _shows_bar(console),
        )
        self._total = total
        self._task = self.add_task("training", total=total, completed=done, headline="-")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of ``step``."""
        headline = f"{_headline(metrics)}  {metrics['tokens_per_s']:,.0f} tokens/s"
        self.update(self._task, completed=step, headline=headline)
        if self.disable and step % max(1, self._total // LINES) == 0:
            self.say(f"step {step}/{self._total}  {headline}")


def _shows_bar(console: Console) -> bool:
    """Whether a bar can be drawn again and again: on a terminal, and in a notebook that has widgets."""
    return find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal


def _headline(metrics: Mapping[str, float]) -> str:
    if "reward" not in metrics:
        accuracy = f"  accuracy {metrics['accuracy']:.3f}" if "accuracy" in metrics else ""
        return f"loss {metrics['loss']:.4f}{accuracy}"
    shown = next((name for name in ("kl_k3", "approx_kl") if name in metrics), None)
    return f"reward {metrics['reward']:.3f}" + (f"  {shown} {metrics[shown]:.4f}" if shown else "")


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the end of a run: the change of the evaluation metrics, and the paths of its files."""
    if result.get("stopped"):
        text = f"stopped after step {result['steps']} by the {result['stopped']}; the same run again goes on from there"
        console.print(text, highlight=False, soft_wrap=True)
    before, after = result["before"], result["after"]
    for name, label in HELD_OUT.items():
        if name in after:
            change = after[name] - before[name]
            console.print(
                f"evaluation, {label}: {before[name]:.3f} before, {after[name]:.3f} after ({change:+.3f})",
                highlight=False,
            )
    for name in ("model", "adapter", "best_model", "page", "picture", "metrics"):
        if result.get(name):
            console.print(f"{name}: {result[name]}", highlight=False, soft_wrap=True)
