"""The contents of a report. `Report` is the file format; ``schema.json`` is generated from it.

A field may be added or changed only together with `SCHEMA_VERSION`: readers refuse what they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator

from core_rl.registry.spec import EngineKind
from core_rl_conformance.catalogue import natural_order, paragraphs_of
from core_rl_conformance.outcomes import CaseResult, Measurement, Outcome

__all__ = [
    "SCHEMA_VERSION",
    "CapabilityRecord",
    "CapabilityState",
    "CaseRecord",
    "CheckRecord",
    "EngineRecord",
    "Environment",
    "MeasurementRecord",
    "Report",
    "Verdict",
    "report_schema",
]

SCHEMA_VERSION: Literal["1.0"] = "1.0"


Number = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"]}]})
]
"""JSON has no infinity, and a comparison that cannot be made has an infinite error."""


class Record(BaseModel):
    """Frozen, and closed to unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        json_schema_serialization_defaults_required=True,
    )


class CapabilityState(StrEnum):
    """The result of the session for a declared capability."""

    CERTIFIED = "certified"
    """Every check that needs it ran and passed."""
    NOT_CERTIFIED = "not certified"
    """A check that needs it failed, or its failure is waived."""
    UNCERTIFIED = "uncertified"
    """Not every check that needs it could run here."""


class Verdict(StrEnum):
    """The session's verdict on an engine."""

    PASSED = "passed"
    PARTIAL = "passed in part"
    """Nothing failed, but the command line left checks, layouts or models out."""
    FAILED = "failed"
    NOT_RUN = "not run"


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
        """The error in relation to its limit."""
        return Measurement(what=self.what, error=self.error, limit=self.limit).ratio


class CaseRecord(Record):
    """The outcome of one check on one engine, layout and model."""

    check: str
    engine: str
    partner: str = ""
    """The engine beside it, for a check of a pair."""
    layout: str
    model: str
    dtype: str
    seed: int
    outcome: Outcome
    provisional: bool
    """It does not count against the engine yet."""
    seconds: float
    starting_s: float = 0.0
    """Seconds of ``seconds`` that went into starting ranks."""
    capabilities: tuple[str, ...]
    """Declared capabilities that this case certifies when it passes."""
    measurements: tuple[MeasurementRecord, ...] = ()
    reason: str = ""
    """Why it was not run, is not supported or is waived."""
    message: str = ""
    """What the check said when it failed."""

    @classmethod
    def of(cls, result: CaseResult, message: str = "") -> CaseRecord:
        """The record of what a session found."""
        return cls.model_validate({**asdict(result), "message": message})

    @property
    def worst(self) -> MeasurementRecord | None:
        """The measurement that came closest to its limit, or went furthest beyond it."""
        return max(self.measurements, key=lambda measurement: measurement.ratio, default=None)

    @property
    def place(self) -> str:
        """The layout, model, dtype and partner, as in the test's name."""
        place = f"{self.layout}-{self.model}-{self.dtype}"
        return f"{place}-with-{self.partner}" if self.partner else place


class CheckRecord(Record):
    """A check of the suite."""

    identifier: str
    kind: EngineKind
    """The engines that it is for."""
    partner: EngineKind | None = None
    """The kind of a second engine that it needs."""
    description: str
    """What is required, why, and where to look when it fails."""
    requires: tuple[str, ...]
    """Capabilities without which it is not supported."""
    provisional: bool

    @property
    def order(self) -> tuple[int, str]:
        """A sorting key: I2 before I10, and what is no invariant at the end."""
        return natural_order(self.identifier)

    @property
    def title(self) -> str:
        """The requirement."""
        return self.paragraphs[0]

    @property
    def paragraphs(self) -> list[str]:
        """The requirement, the reason and the places to look at, each in one line."""
        return paragraphs_of(self.description)


class CapabilityRecord(Record):
    """A capability that the engine declares."""

    name: str
    state: CapabilityState
    reason: str = ""
    """Why it is not certified."""


class EngineRecord(Record):
    """An engine, where it comes from, and the verdict on it."""

    name: str
    kind: EngineKind
    description: str
    distribution: str
    version: str
    protocol: tuple[int, int]
    """The interface version that it was written for."""
    capabilities: tuple[CapabilityRecord, ...]
    """All that it declares; every other one is not supported."""
    verdict: Verdict
    problems: tuple[str, ...] = ()
    """What counts against it beside failed checks."""


class Environment(Record):
    """The machine, the packages and the threads of the session."""

    python: str
    system: str
    processor: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """Threads of torch in the process of the suite; each rank has one."""
    gpus: tuple[str, ...]
    packages: dict[str, str]
    """Versions of the engines' distributions, of core-rl, and of what they require."""


class Report(Record):
    """One session of the suite."""

    schema_version: Literal["1.0"] = SCHEMA_VERSION
    suite_version: str
    """The version of core-rl that the suite came with."""
    protocol: tuple[int, int]
    """The interface version of that core."""
    created: datetime
    """UTC."""
    command: str
    """The command line that made it."""
    seed: int
    complete: bool
    """Whether nothing was left out by the command line."""
    environment: Environment
    engines: tuple[EngineRecord, ...]
    checks: tuple[CheckRecord, ...]
    results: tuple[CaseRecord, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the engines' verdicts."""
        found = {engine.verdict for engine in self.engines}
        order = (Verdict.FAILED, Verdict.NOT_RUN, Verdict.PARTIAL, Verdict.PASSED)
        return next((verdict for verdict in order if verdict in found), Verdict.NOT_RUN)

    @property
    def slowest(self) -> list[CaseRecord]:
        """The ten cases that took longest."""
        executed = [case for case in self.results if case.outcome.executed]
        return sorted(executed, key=lambda case: -case.seconds)[:10]

    def cases(self, engine: str | None = None, check: str | None = None) -> list[CaseRecord]:
        """The cases of one engine, one check, or both."""
        return [
            case for case in self.results if engine in (None, case.engine) and check in (None, case.check)
        ]

    @model_validator(mode="after")
    def _names_are_known(self) -> Report:
        _refuse_unknown(
            "engine", {case.engine for case in self.results}, {part.name for part in self.engines}
        )
        _refuse_unknown(
            "check", {case.check for case in self.results}, {part.identifier for part in self.checks}
        )
        return self


def _refuse_unknown(what: str, used: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(used) - set(known))
    if unknown:
        raise ValueError(f"results name the {what} {unknown[0]!r}, which the report does not list")


def report_schema() -> dict[str, Any]:
    """The JSON schema of a report file, as ``schema.json`` publishes it."""
    schema = Report.model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:core-rl:conformance-report:{SCHEMA_VERSION}",
        **schema,
    }
