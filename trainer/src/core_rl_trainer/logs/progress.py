"""The progress of a run: lines, a bar on a terminal and in a notebook, and the log file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from core_rl.errors import ConfigError

TERMINAL = logging.getLogger("core_rl_trainer.terminal")
"""The lines on the terminal, for the log file of a run alone."""
TERMINAL.propagate = False
TERMINAL.setLevel(logging.INFO)

FIRST = 10
"""Steps from the start of the process that each have a line."""
LINES = 10
"""The approximate number of lines of later steps."""
SILENCE_S = 60.0
"""Seconds after which a later step has a line in any case."""

SHORTEST = 0.05
"""The shortest phase, in seconds, whose time is printed."""


HELD_OUT = {
    "eval_reward": "mean reward, sampled",
    "eval_reward_greedy": "mean reward, greedy",
    "eval_loss": "loss",
    "eval_accuracy": "accuracy",
}
"""Metrics of an evaluation that are printed at the end of a run."""


class TrainingProgress(Progress):
    """Shows the phase before the first step; then reward and a KL, or the loss, tokens per second and the time left."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[headline]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            # A bar is drawn again and again: on a terminal, and in a notebook that has widgets.
            disable=not (find_spec("ipywidgets") if console.is_jupyter else console.is_terminal),
        )
        self._total = total
        self._done = done
        self._seconds: dict[str, float] = {}
        self._printed = 0.0
        """The time of the last line of a step."""
        self._task = self.add_task("training", total=total, completed=done, headline="-")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase ``name`` before the first step, with its time."""
        if self.disable:
            print_line(self.console, f"{name} …")
        self.reset(self._task, description=name, completed=self._done)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def begin_steps(self) -> None:
        """Show the training from here on, and the times of the phases before it."""
        shown = {name: seconds for name, seconds in self._seconds.items() if seconds >= SHORTEST}
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in shown.items())
        print_line(self.console, f"ready after {sum(self._seconds.values()):.1f} s: {times}")
        self.reset(self._task, description="training", completed=self._done)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        headline = f"{_headline(metrics)}  {metrics['tokens_per_s']:,.0f} tokens/s"
        self.update(self._task, completed=step, headline=headline)
        is_first = step - self._done <= FIRST
        is_late = time.monotonic() - self._printed >= SILENCE_S
        if is_first or is_late or step == self._total or step % max(1, self._total // LINES) == 0:
            self._printed = time.monotonic()
            print_line(self.console, f"step {step}/{self._total}  {headline}")


def print_line(console: Console, text: str) -> None:
    """Print a line, above a bar where there is one, and to the log of the run."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    TERMINAL.info(text)


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
        print_line(console, text)
    before, after = result["before"], result["after"]
    for name, label in HELD_OUT.items():
        if name in after:
            values = f"{after[name]:.3f} after"
            if before is not None:
                values = f"{before[name]:.3f} before, {values} ({after[name] - before[name]:+.3f})"
            print_line(console, f"evaluation, {label}: {values}")
    for name in ("model", "adapter", "best_model", "page", "picture", "metrics"):
        if result.get(name):
            print_line(console, f"{name}: {result[name]}")


logger = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class TerminalLog:
    """Collects lines until `open` names a file, and appends them there from then on."""

    def __init__(self) -> None:
        self._handler = MemoryHandler(capacity=1)  # without a target nothing leaves it
        self._handler.setLevel(logging.INFO)

    def open(self, path: Path) -> None:
        """Append to ``path``. Raises `ConfigError` where it cannot be written."""
        try:
            file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        file.setFormatter(logging.Formatter(FORMAT))
        self._handler.setTarget(file)
        self._handler.flush()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside the context, lines and warnings are logged, and an error that ends it."""
        handlers: list[logging.Handler] = [self._handler]
        if not logger.hasHandlers() and logging.lastResort is not None:
            handlers.append(logging.lastResort)  # stderr, which the first handler of the root would replace
        root = logging.getLogger()
        for handler in handlers:
            root.addHandler(handler)
        TERMINAL.addHandler(self._handler)
        try:
            yield
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            TERMINAL.error("%s", "\n".join([text, *getattr(error, "__notes__", ())]))
            raise
        finally:
            TERMINAL.removeHandler(self._handler)
            for handler in handlers:
                root.removeHandler(handler)
            file = self._handler.target
            self._handler.close()
            if file is not None:
                file.close()
