"""Comparison of runs: the fields in which their recipes differ, and their newest metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core_rl.config.secret import hidden
from core_rl_trainer.logs.listing import RunSummary, read_rows

__all__ = ["differing_recipes", "differing_values", "newest_metrics"]

NO_METRICS = ("step", "version")
NO_FIELDS = ("output_dir", "fresh")
"""Fields in which any two runs differ."""


def differing_recipes(first: RunSummary, second: RunSummary) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes differ, each with both values."""
    return {
        field: (hidden(field.rpartition(".")[2], left), hidden(field.rpartition(".")[2], right))
        for field, (left, right) in differing_values(first.recipe, second.recipe).items()
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


def newest_metrics(*runs: RunSummary) -> dict[str, list[float | None]]:
    """The newest value of each metric of ``runs``, for each run; None where a run lacks the metric."""
    newest = [{name: value for row in read_rows(run.path) for name, value in row.items()} for run in runs]
    names = dict.fromkeys(name for values in newest for name in values if name not in NO_METRICS)
    return {name: [values.get(name) for values in newest] for name in names}
