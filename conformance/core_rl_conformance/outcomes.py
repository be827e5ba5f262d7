"""The five outcomes of a check on one case, and its result, which travels from a worker to the report."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from core_rl.errors import RolloutError

Number = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"]}]})
]
"""JSON has no infinity, and a comparison that cannot be made has an infinite error."""
NotProvisional = Annotated[Literal[False], Field(exclude=True)]
"""A field of reports before 1.5, which nothing writes any more."""
PROPERTY = "core_rl_conformance"
"""The user property of a test report that holds a `CaseRecord`; JUnit files show it."""


class Outcome(StrEnum):
    """Never just two."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SUPPORTED = "not supported"
    """The engine does not declare a capability that the check needs."""
    WAIVED = "waived"
    """Failure as the engine's profile declares."""
    NOT_RUN = "not run"
    """The environment or the command line left it out."""

    @property
    def executed(self) -> bool:
        """Whether the check ran to an answer."""
        return self in (Outcome.PASSED, Outcome.FAILED, Outcome.WAIVED)


class NotRun(Exception):
    """Raised by a check that has no answer about the engine, with the reason: the case ends as *not run*."""


class NotSupported(Exception):
    """Raised by a check whose target lacks what it judges, with the reason: the case ends as *not supported*."""


class LostRequests(RolloutError):
    """Raised where an engine leaves requests, or an update, without an answer: each takes minutes to find out."""


class Record(BaseModel):
    """Frozen, and closed to unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        json_schema_serialization_defaults_required=True,
    )


class MeasurementRecord(Record):
    """One comparison inside a check."""

    what: str
    error: Number
    """The largest difference from the oracle."""
    limit: Number
    """The largest error that passes."""
    points: tuple[tuple[Number, Number], ...] = ()
    """Some of the compared values as (engine, oracle), for a scatter plot."""

    @property
    def ratio(self) -> float:
        """The error in relation to its limit; exact comparisons give 0 or infinity."""
        if self.limit > 0:
            return self.error / self.limit
        return float("inf") if self.error else 0.0


class CaseRecord(Record):
    """The outcome of one check on one engine, layout and model."""

    check: str
    engine: str
    partner: str = ""
    """The second engine, for a check of a pair."""
    layout: str
    model: str
    dtype: str
    seed: int
    outcome: Outcome
    provisional: NotProvisional = False
    seconds: float
    starting_s: float = 0.0
    """Seconds of ``seconds`` that went into starting ranks."""
    capabilities: tuple[str, ...]
    """Declared capabilities that this case certifies when it passes."""
    measurements: tuple[MeasurementRecord, ...] = ()
    reason: str = ""
    """Why it was not run, is not supported or is waived."""
    message: str = ""
    """Message of the failed check."""
    reproduction: str = ""
    """A script in plain torch that computes the expected values of the failed comparison; empty without one."""

    @property
    def label(self) -> str:
        """The check, and the partner of a pair."""
        return f"{self.check} with {self.partner}" if self.partner else self.check

    @property
    def worst(self) -> MeasurementRecord | None:
        """The measurement that came closest to its limit, or went furthest beyond it."""
        return max(self.measurements, key=lambda measurement: measurement.ratio, default=None)

    @property
    def place(self) -> str:
        """The layout, model, dtype and partner, as in the test's name."""
        place = f"{self.layout}-{self.model}-{self.dtype}"
        return f"{place}-with-{self.partner}" if self.partner else place

    def to_property(self) -> tuple[str, str]:
        """User property, which survives the way from a pytest-xdist worker."""
        return PROPERTY, self.model_dump_json()

    @classmethod
    def from_properties(cls, properties: Iterable[tuple[str, object]]) -> CaseRecord | None:
        """The result among the user properties of a report, if there is one."""
        records = [value for name, value in properties if name == PROPERTY]
        return cls.model_validate_json(str(records[-1])) if records else None


def worst_of(cases: Iterable[CaseRecord]) -> tuple[MeasurementRecord, CaseRecord] | None:
    """The measurement of ``cases`` that came closest to its limit, or went furthest beyond it, and its case."""
    measured = [(worst, case) for case in cases if (worst := case.worst) is not None]
    return max(measured, key=lambda pair: pair[0].ratio, default=None)
