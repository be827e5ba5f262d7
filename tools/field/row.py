"""A row of the page: its cases, each with a figure, a refusal of the framework, or the reason why nothing ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from field.peers.interface import NotRun, Peer
from field.result import Result, State, judged


@dataclass(frozen=True)
class Figure:
    """What a measurement gives."""

    error: float
    limit: float
    unit: str


@dataclass(frozen=True)
class Row:
    """A measurement of every framework."""

    title: str
    description: str
    cases: Iterable[str]
    measure: Callable[[Peer, str], Figure]
    """The figure of a case. Raises `NotRun`, or the framework's own errors."""


def measured(row: Row, case: str, peer: Peer, named: dict[str, Any]) -> Result:
    """The figure of ``case``; an error that the framework raises is its refusal."""
    named = {"row": row.title, "case": case, **named}
    try:
        figure = row.measure(peer, case)
    except NotRun as reason:
        return Result(**named, state=State.NOT_RUN, reason=str(reason))
    # Frameworks refuse a model with errors of any type, and the page quotes them.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [""]
        return Result(**named, state=State.REFUSED, reason=f"{type(error).__name__}: {lines[0]}")
    return Result(
        **named,
        state=judged(figure.error, figure.limit),
        error=figure.error,
        limit=figure.limit,
        unit=figure.unit,
    )
