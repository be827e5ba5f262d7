"""The page that compares two runs: the fields of their recipes that differ, and the curves of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from core_rl.config.secret import hidden
from core_rl.pages import Chart, line_chart, page_environment
from core_rl_trainer.logs.listing import RunSummary, read_rows
from core_rl_trainer.logs.metrics_log import Row
from core_rl_trainer.logs.page import CHARTS, COLOURS, TEMPLATES

__all__ = ["differing_recipes", "differing_values", "render_diff"]

NO_METRICS = ("step", "version")
NO_FIELDS = ("output_dir", "fresh")
"""Fields in which any two runs differ."""


def differing_recipes(first: RunSummary, second: RunSummary) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes differ, each with both values."""
    found = differing_values(first.recipe, second.recipe)
    return {
        field: (hidden(field.rpartition(".")[2], left), hidden(field.rpartition(".")[2], right))
        for field, (left, right) in found.items()
        if field not in NO_FIELDS
    }


def differing_values(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes, as plain values, differ, each with both values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*old, *new}):
        left, right, field = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            differing |= differing_values(left, right, f"{field}.")
        elif left != right:
            differing[field] = left, right
    return differing


def render_diff(first: RunSummary, second: RunSummary) -> str:
    """The page of two runs: one file that needs no network and no script."""
    rows = [read_rows(run.path) for run in (first, second)]
    names = _names(first, second)
    main, others = _charts(dict(zip(names, rows, strict=True)))
    values = {
        "runs": tuple(zip(names, (first, second), strict=True)),
        "fields": differing_recipes(first, second),
        "newest": _newest(rows),
        "charts": main,
        "others": others,
        "colours": COLOURS | {"interrupted": "failed"},
    }
    environment = page_environment(TEMPLATES)
    environment.filters["number"] = lambda value: "-" if value is None else f"{value:.4g}"
    return environment.get_template("diff.html.jinja").render(values)


def _names(first: RunSummary, second: RunSummary) -> tuple[str, str]:
    """Short names that differ."""
    names = first.path.resolve().name, second.path.resolve().name
    return names if names[0] != names[1] else (str(first.path), str(second.path))


def _charts(runs: Mapping[str, Sequence[Row]]) -> tuple[list[Chart], list[Chart]]:
    """A chart of each metric, with a curve of each run: the main metrics, and the others."""
    metrics = sorted(
        {name for rows in runs.values() for row in rows for name in row if name not in NO_METRICS}
    )
    patterns = [pattern for _, wanted in CHARTS for pattern in wanted]
    main = [name for pattern in patterns for name in metrics if fnmatch(name, pattern)]
    others = [name for name in metrics if name not in main]
    last = max((row["step"] or 0.0 for rows in runs.values() for row in rows), default=0.0)

    main_charts, other_charts = ([_chart(name, runs, last) for name in names] for names in (main, others))
    return [chart for chart in main_charts if chart], [chart for chart in other_charts if chart]


def _chart(metric: str, runs: Mapping[str, Sequence[Row]], last: float) -> Chart | None:
    """The curves of ``metric``, of the runs that have it, each in the colour of its run."""
    series = {
        name: [(row["step"] or 0.0, value) for row in rows if (value := row.get(metric)) is not None]
        for name, rows in runs.items()
    }
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    chart, numbers = line_chart(metric, series, last), list(runs)
    return replace(chart, curves=tuple(replace(c, number=numbers.index(c.name)) for c in chart.curves))


def _newest(rows: Sequence[Sequence[Row]]) -> dict[str, list[float | None]]:
    """The newest value of each metric of the training and of evaluations, for each run."""
    wanted = ("reward", "loss", "accuracy", "eval_*")
    names = dict.fromkeys(
        name for pattern in wanted for run in rows for row in run for name in row if fnmatch(name, pattern)
    )
    return {
        name: [next((row[name] for row in reversed(run) if name in row), None) for run in rows]
        for name in names
    }
