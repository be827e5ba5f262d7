"""The page of a run: curves, samples of rollouts, and the command that resumes it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from core_rl.machine import describe_machine
from core_rl.pages import Chart, line_chart, page_environment
from core_rl.registry.engines import list_engines
from core_rl_trainer.data.image_files import small_copy
from core_rl_trainer.logs.metrics_log import Row
from core_rl_trainer.logs.samples import LARGEST_SIDE

Status = Literal["running", "stopped", "complete"]
Points = Sequence[tuple[float, float | None]]

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = {"running": "not-run", "stopped": "failed", "complete": "passed"}
Groups = tuple[tuple[str, tuple[str, ...]], ...]
FIRST_OF_ROLLOUTS: Groups = (
    ("Reward", ("reward", "eval_reward", "eval_reward_greedy")),
    ("KL to the reference", ("kl_k1", "kl_k2", "kl_k3")),
    ("Terms of the reward", ("reward/*", "eval_reward/*")),
    ("KL of the step's updates", ("approx_kl",)),
)
FIRST_OF_DATA: Groups = (("Loss", ("loss", "eval_loss")), ("Accuracy", ("accuracy", "eval_accuracy")))
MAIN: Groups = (
    ("Share of clipped tokens", ("clip_fraction",)),
    ("Entropy", ("entropy", "entropy_estimate")),
    ("Gradient norm", ("grad_norm", "critic_grad_norm")),
    ("Tokens of a completion", ("completion_tokens",)),
    ("Share of completions and groups", ("truncated", "groups_without_signal", "mixed_versions")),
    ("Mismatch: KL(rollout ‖ trainer)", ("mismatch_k1", "mismatch_k3", "mismatch_chi2")),
    ("Mismatch: largest difference", ("mismatch_max",)),
    ("Mismatch: share of tokens above 0.01 nats", ("mismatch_share",)),
    ("Staleness in versions", ("staleness_mean", "staleness_max")),
    ("Learning rate", ("lr", "critic_lr")),
    ("Seconds of each phase", ("time_*",)),
    ("Tokens per second", ("tokens_per_s",)),
)
"""Titles of charts, and the metrics in them; ``*`` stands for any ending."""
EVALUATIONS = 12
"""The newest evaluations, of which samples are shown."""
CHARACTERS = 4000
"""Characters of a text that are shown; a longer text keeps its beginning and its end."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The first and the newest evaluation."""

    first: int
    last: int
    rows: tuple[tuple[str, float | None, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts of reward and KL (else loss), of related metrics, and of each further one; legends by metric drawn."""

    first: list[Chart]
    main: list[Chart]
    further: list[Chart]
    labels: dict[str, str]


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
        engines = (recipe["engine"], recipe["rollout"]["engine"])
        packages = {entry.distribution for entry in list_engines() if entry.name in engines}
        self._machine = describe_machine(packages)
        self._recipe_text = yaml.safe_dump(dict(recipe), sort_keys=False)
        self._environment = page_environment(TEMPLATES)
        self._environment.filters |= {"number": _number, "shortened": _shortened, "embedded": _embedded}

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
        charts = charts_of(rows)
        grouped = [(step, list(group)) for step, group in groupby(samples, lambda row: int(row["step"]))]
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
            "evaluations": _held_out(rows, charts.labels),
            "best": best,
            "charts": charts,
            "samples": grouped[::-1][:EVALUATIONS],  # the newest first
            "restarts": restarts,
        }
        return self._environment.get_template("run.html.jinja").render(values)


def charts_of(rows: Sequence[Row]) -> Charts:
    """Charts of all metrics in ``rows``; a metric that equals an earlier one is named in the legend of that."""
    series: dict[str, list[tuple[float, float | None]]] = {}  # None where the value is not finite
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "version"):
                series.setdefault(name, []).append((row["step"] or 0.0, value))
    of_rollouts = _groups(FIRST_OF_ROLLOUTS, series)
    of_data = _groups(FIRST_OF_DATA, series)
    first, main = (of_rollouts, of_data) if of_rollouts else (of_data, [])
    main = main + _groups(MAIN, series)
    grouped = {name for _, names in first + main for name in names}
    further = [(name, [name]) for name in sorted(series.keys() - grouped)]
    labels = _labels([names for _, names in first + main + further], series)
    last = max((row["step"] or 0.0 for row in rows), default=0.0)

    def drawn(groups: Sequence[tuple[str, list[str]]]) -> list[Chart]:
        shown = [(title, {labels[n]: series[n] for n in names if n in labels}) for title, names in groups]
        return [line_chart(title, curves, last) for title, curves in shown if curves]

    return Charts(first=drawn(first), main=drawn(main), further=drawn(further), labels=labels)


def main_chart(rows: Sequence[Row]) -> Chart | None:
    """The chart of the reward, or of the loss where there is none."""
    charts = charts_of(rows)
    return next(iter(charts.first + charts.main), None)


def _groups(groups: Groups, series: Mapping[str, Points]) -> list[tuple[str, list[str]]]:
    """The ``groups`` of which ``series`` has metrics, with these."""
    matching = [
        (title, [name for pattern in patterns for name in series if fnmatchcase(name, pattern)])
        for title, patterns in groups
    ]
    return [(title, names) for title, names in matching if names]


def _labels(groups: Sequence[Sequence[str]], series: Mapping[str, Points]) -> dict[str, str]:
    """Names of series that differ, with all names of each in its label."""
    labels: dict[str, str] = {}
    for names in groups:
        for name in names:
            points = series[name]
            equal = [first for first in labels if series[first] == points]
            same = [x for x in equal if x in names or name.startswith(x) or _is_particular(points)]
            first = same[0] if same else name
            labels[first] = f"{labels[first]} = {name}" if same else name
    return labels


def _is_particular(points: Points) -> bool:
    """Whether another metric has the same values by no coincidence: they change, or have many digits."""
    values = {value for _, value in points}
    return len(values) > 1 or not all(value is None or float(1000 * value).is_integer() for value in values)


def _held_out(rows: Sequence[Row], labels: Mapping[str, str]) -> HeldOut | None:
    evaluated = [row for row in rows if any(name.startswith("eval_") for name in row)]
    if not evaluated:
        return None
    first, last = evaluated[0], evaluated[-1]
    shown = {name: label for name, label in labels.items() if name.startswith("eval_") and name in last}
    return HeldOut(
        first=int(first["step"] or 0),
        last=int(last["step"] or 0),
        rows=tuple((label, first.get(name), last[name]) for name, label in shown.items()),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@lru_cache(maxsize=256)
def _embedded(image: str) -> str | None:
    """A small copy of the image in the file, or the data URI, ``image`` as the URL of an ``img``.

    None where it can no longer be read: that must not end a run.
    """
    header, _, body = image.partition(",")
    try:
        return small_copy(base64.b64decode(body) if header.startswith("data:") else image, LARGEST_SIDE)
    except ValueError:
        return None


def _shortened(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} more characters …]\n{text[-half:]}"
