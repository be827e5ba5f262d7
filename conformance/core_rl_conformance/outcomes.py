"""The five outcomes of a check on one case, and how a result travels from a worker to the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["PROPERTY", "CaseResult", "Measurement", "NotRun", "Outcome"]

PROPERTY = "core_rl_conformance"
"""The user property of a test report that holds a `CaseResult`; JUnit files show it."""


class Outcome(StrEnum):
    """Never just two."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SUPPORTED = "not supported"
    """The engine does not declare a capability that the check needs."""
    WAIVED = "waived"
    """It failed as the engine's profile declares."""
    NOT_RUN = "not run"
    """The environment or the command line left it out."""

    @property
    def executed(self) -> bool:
        """Whether the check ran to an answer."""
        return self in (Outcome.PASSED, Outcome.FAILED, Outcome.WAIVED)


class NotRun(Exception):
    """Raised by a check that has no answer about the engine, with the reason: the case ends as *not run*."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One comparison inside a check."""

    what: str
    error: float
    limit: float
    points: tuple[tuple[float, float], ...] = ()
    """Some of the compared values as (engine, oracle), for a plot."""

    @property
    def ratio(self) -> float:
        """The error in relation to what is allowed; exact comparisons give 0 or infinity."""
        if self.limit > 0:
            return self.error / self.limit
        return float("inf") if self.error else 0.0


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The outcome of one check on one engine, layout and model."""

    check: str
    engine: str
    layout: str
    model: str
    dtype: str
    seed: int
    outcome: Outcome
    provisional: bool
    seconds: float
    capabilities: tuple[str, ...]
    """Declared capabilities that this case certifies when it passes."""
    measurements: tuple[Measurement, ...] = ()
    reason: str = ""
    """Why it was not run, is not supported or is waived."""
    partner: str = ""
    """The engine beside it, for a check of a pair; empty for others."""
    starting_s: float = 0.0
    """Seconds of ``seconds`` that went into starting ranks."""

    @property
    def label(self) -> str:
        """The check, and the partner of a pair."""
        return f"{self.check} with {self.partner}" if self.partner else self.check

    @property
    def worst(self) -> Measurement | None:
        """The measurement that came closest to its limit, or went furthest beyond it."""
        return max(self.measurements, key=lambda measurement: measurement.ratio, default=None)

    def to_property(self) -> tuple[str, str]:
        """As a user property, which survives the way from a pytest-xdist worker."""
        return PROPERTY, json.dumps(asdict(self))

    @staticmethod
    def from_properties(properties: Iterable[tuple[str, object]]) -> CaseResult | None:
        """The result among the user properties of a report, if there is one."""
        found = [value for name, value in properties if name == PROPERTY]
        return _parsed(json.loads(str(found[-1]))) if found else None


def _parsed(values: Mapping[str, Any]) -> CaseResult:
    return CaseResult(
        **{
            **values,
            "outcome": Outcome(values["outcome"]),
            "capabilities": tuple(values["capabilities"]),
            "measurements": tuple(
                Measurement(**{**part, "points": tuple(map(tuple, part["points"]))})
                for part in values["measurements"]
            ),
        }
    )
