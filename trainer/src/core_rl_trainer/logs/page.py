"""The page of a run: curves, samples of rollouts, and the command that resumes it."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from io import BytesIO
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from core_rl.machine import Machine, describe_machine
from core_rl.pages import Chart, line_chart, page_environment
from core_rl.registry.engines import list_engines
from core_rl_trainer.logs.metrics_log import Row

__all__ = ["RunPage", "Status", "charts_of", "main_chart", "run_machine"]

Status = Literal["running", "stopped", "complete"]

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = {"running": "not-run", "stopped": "failed", "complete": "passed"}
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "eval_reward", "eval_reward_greedy")),
    ("Terms of the reward", ("reward/*", "eval_reward/*")),
    ("Loss", ("loss", "eval_loss")),
    ("Accuracy", ("accuracy", "eval_accuracy")),
    ("KL to the reference", ("kl_k1", "kl_k2", "kl_k3")),
    ("KL of the step's updates", ("approx_kl",)),
    ("Share of clipped tokens", ("clip_fraction",)),
    ("Entropy", ("entropy", "entropy_estimate")),
    ("Gradient norm", ("grad_norm", "critic_grad_norm")),
    ("Tokens of a completion", ("completion_tokens",)),
    ("Share of completions and groups", ("truncated", "groups_without_signal", "mixed_versions")),
    ("Mismatch: KL(rollout ‖ trainer)", ("mismatch_k1", "mismatch_k3", "mismatch_chi2")),
    ("Mismatch: largest difference", ("mismatch_max",)),
    ("Staleness in versions", ("staleness_mean", "staleness_max")),
    ("Learning rate", ("lr", "critic_lr")),
    ("Seconds of each phase", ("time_*",)),
    ("Tokens per second", ("tokens_per_s",)),
)
"""The charts that come first, and the metrics in them; ``*`` stands for any ending."""
EVALUATIONS = 12
"""The newest evaluations, of which samples are shown."""
LARGEST_SIDE = 160
"""Pixels of an image of an example; the page has it small, next to the text."""
CHARACTERS = 4000
"""Characters of a text that are shown; a longer text keeps its beginning and its end."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The first and the newest evaluation."""

    first: int
    last: int
    rows: tuple[tuple[str, float | None, float | None], ...]


class RunPage:
    """Renders the page of a run; it needs nothing else: no network, no script, no other file."""

    def __init__(
        self,
        recipe: Mapping[str, Any],
        directory: Path,
        cluster: str = "",
        roles: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        """``recipe`` as plain values, the machines in words, and engine and ranks of each role in words."""
        self._settled = {"recipe": recipe, "directory": directory, "cluster": cluster, "roles": roles}
        self._machine = run_machine({recipe["engine"], recipe["rollout"]["engine"]})
        self._recipe_text = yaml.safe_dump(dict(recipe), sort_keys=False)
        self._environment = page_environment(TEMPLATES)
        self._environment.filters |= {
            "number": _number,
            "shortened": _shortened,
            "embedded": _embedded,
        }

    def render(
        self,
        rows: Sequence[Row],
        samples: Sequence[Mapping[str, Any]],
        *,
        status: Status,
        best: Mapping[str, Any] | None = None,
        problem: str = "",
        restarts: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The whole page, from metric ``rows`` and ``samples`` of rollouts.

        ``problem`` is why a run stopped, and ``restarts`` are those after ranks or machines were lost.
        """
        values = {
            **self._settled,
            "recipe_text": self._recipe_text,
            "working_directory": Path.cwd(),
            "machine": self._machine,
            "status": status,
            "problem": problem,
            "colours": COLOURS,
            "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
            "step": int(max((row["step"] or 0 for row in rows), default=0)),
            "evaluations": _held_out(rows),
            "best": best,
            "charts": charts_of(rows),
            "samples": _by_step(samples),
            "restarts": restarts,
        }
        return self._environment.get_template("run.html.jinja").render(values)


def charts_of(rows: Sequence[Row]) -> tuple[list[Chart], list[Chart]]:
    """Charts of all metrics in ``rows``: the main charts of related metrics, and a chart of each further metric."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("step", "version")))
    main = []
    for title, patterns in CHARTS:
        matching = [name for pattern in patterns for name in names if _matches(name, pattern)]
        names = [name for name in names if name not in matching]
        main.append(_chart(title, matching, rows))
    further = [_chart(name, [name], rows) for name in sorted(names)]
    return [chart for chart in main if chart], [chart for chart in further if chart]


def main_chart(rows: Sequence[Row]) -> Chart | None:
    """The chart of the reward, or of the loss where there is none."""
    return next(iter(charts_of(rows)[0]), None)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _chart(title: str, names: Sequence[str], rows: Sequence[Row]) -> Chart | None:
    series = {
        name: [(row["step"] or 0.0, value) for row in rows if (value := row.get(name)) is not None]
        for name in names
    }
    series = {name: points for name, points in series.items() if points}
    last = max((row["step"] or 0.0 for row in rows), default=0.0)
    return line_chart(title, series, last) if series else None


def run_machine(engines: Collection[str]) -> Machine:
    """This machine, with the versions of the packages behind ``engines``."""
    return describe_machine({entry.distribution for entry in list_engines() if entry.name in engines})


def _held_out(rows: Sequence[Row]) -> HeldOut | None:
    evaluated = [row for row in rows if any(name.startswith("eval_") for name in row)]
    if not evaluated:
        return None
    first, last = evaluated[0], evaluated[-1]
    names = [name for name in last if name.startswith("eval_")]
    return HeldOut(
        first=int(first["step"] or 0),
        last=int(last["step"] or 0),
        rows=tuple((name, first.get(name), last[name]) for name in names),
    )


def _by_step(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """The newest first."""
    grouped = [(step, list(rows)) for step, rows in groupby(samples, lambda row: int(row["step"]))]
    return grouped[::-1][:EVALUATIONS]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@lru_cache(maxsize=256)
def _embedded(path: str) -> str | None:
    """The image in the file ``path``, made small, as the URL of an ``img``; None where it can no longer be read."""
    from PIL import Image

    content = BytesIO()
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
    except OSError:
        return None
    small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    small.save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _shortened(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} more characters …]\n{text[-half:]}"
