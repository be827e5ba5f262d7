"""A figure of one framework, and the file that holds all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "results" / "field.json"


class State(StrEnum):
    """How a measurement ended."""

    RIGHT = "right"
    """The error is within its limit."""
    WRONG = "wrong"
    REFUSED = "refused"
    """The framework raised an error in place of a result."""
    NOT_RUN = "not run"
    """There is no result; never to be shown as a score."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A cell of the page."""

    row: str
    """The measurement."""
    case: str
    """The model or the setting within the row."""
    framework: str
    version: str
    state: State
    error: float | None = None
    """In ``unit``; None where a comparison with the limit alone is known, or nothing ran."""
    limit: float | None = None
    unit: str = ""
    """``nats``, ``%``, or the compared quantity."""
    reason: str = ""
    """Why there is no figure, or a remark to it."""
    command: str = ""

    def __post_init__(self) -> None:
        judged = self.state in (State.RIGHT, State.WRONG)
        if judged == (self.limit is None):
            raise ValueError(
                f"{self.row} of {self.framework} is '{self.state}' with the limit {self.limit}; results that are "
                "right or wrong have a limit, and others have none"
            )


def judged(error: float, limit: float) -> State:
    """Whether ``error`` is within ``limit``; NaN is not."""
    return State.RIGHT if error <= limit else State.WRONG


def read(file: Path = FILE) -> list[Result]:
    """The results of ``file``; none where it does not exist."""
    if not file.exists():
        return []
    parts = json.loads(file.read_text())
    return [Result(**{**part, "state": State(part["state"])}) for part in parts]


def write(results: Iterable[Result], file: Path = FILE) -> None:
    """Replace ``file``."""
    file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
