"""The contents of a report. `Report` is the file format, and `report_schema` its JSON schema.

A field may be added or changed only together with `SCHEMA_VERSION`: readers refuse unknown fields.
"""

from __future__ import annotations

import shlex
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, model_validator

from core_rl.machine import Machine
from core_rl_conformance.catalogue import TargetKind, natural_order, paragraphs_of
from core_rl_conformance.outcomes import CaseRecord, NotProvisional, Record

SCHEMA_VERSION: Literal["1.5"] = "1.5"


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


class CheckRecord(Record):
    """A check of the suite."""

    identifier: str
    kind: TargetKind
    """The engines that it is for, or trainers."""
    partner: TargetKind | None = None
    """The kind of a second engine that it needs."""
    description: str
    """Requirement, reason, and where to look after a failure."""
    requires: tuple[str, ...]
    """Capabilities without which it is not supported."""
    provisional: NotProvisional = False

    @property
    def order(self) -> tuple[int, str]:
        """A sorting key: I2 before I10, and rules of the interface at the end."""
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
    meaning: str = Field(default="", exclude=True)
    """The part that passed checks show, where its name alone promises more; computed from results."""


class CodeRecord(Record):
    """Identity of some code: results of two digests are results of two engines."""

    digest: str
    """SHA-256 of the names and contents of its source files, as the session imported them."""
    commit: str = ""
    """The commit in its repository, with ``-dirty`` after changes; empty outside of a repository."""

    @property
    def short(self) -> str:
        """The first digits of the digest, and of the commit where there is one."""
        sha, _, dirty = self.commit.partition("-")
        commit = f"{sha[:8]}{dirty and '-'}{dirty}"
        return f"{self.digest[:8]} (commit {commit})" if commit else self.digest[:8]


class EngineRecord(Record):
    """An engine, where it comes from, and the verdict on it."""

    name: str
    kind: TargetKind
    description: str
    distribution: str
    version: str
    code: CodeRecord
    """Source files of the distribution."""
    protocol: tuple[int, int]
    """The interface version that it was written for."""
    capabilities: tuple[CapabilityRecord, ...]
    """Declared capabilities; every other is not supported."""
    verdict: Verdict
    problems: tuple[str, ...] = ()
    """Problems besides failed checks."""


class Report(Record):
    """One session of the suite."""

    schema_version: Literal["1.2", "1.3", "1.4", "1.5"] = SCHEMA_VERSION
    """1.3 has trainers besides engines, 1.4 reproductions of failures, and 1.5 no provisional checks."""
    suite_version: str
    """The version of core-rl that the suite came with."""
    suite_code: CodeRecord
    """Source files of the suite, its oracle, and the core."""
    protocol: tuple[int, int]
    """The interface version of that core."""
    created: datetime
    """UTC."""
    command: str
    """The command line that made it."""
    seed: int
    complete: bool
    """Whether nothing was left out by the command line."""
    environment: Machine
    engines: tuple[EngineRecord, ...]
    checks: tuple[CheckRecord, ...]
    results: tuple[CaseRecord, ...]
    digest: str = ""
    """SHA-256 of everything else, as `core_rl_conformance.report.files` computes it; empty before it is written."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the engines' verdicts."""
        verdicts = {engine.verdict for engine in self.engines}
        order = (Verdict.FAILED, Verdict.NOT_RUN, Verdict.PARTIAL, Verdict.PASSED)
        return next((verdict for verdict in order if verdict in verdicts), Verdict.NOT_RUN)

    @property
    def extent(self) -> str:
        """The part of the suite that its command selected."""
        if self.complete:
            return "full"
        return "quick" if "--quick" in shlex.split(self.command) else "in part"

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
        engines, checks = {part.name for part in self.engines}, {part.identifier for part in self.checks}
        unknown = {f"engine {case.engine!r}" for case in self.results if case.engine not in engines}
        unknown |= {f"check {case.check!r}" for case in self.results if case.check not in checks}
        if unknown:
            raise ValueError(f"results name the {max(unknown)}, which the report does not list")
        return self


def report_schema() -> dict[str, Any]:
    """The JSON schema of a report file."""
    schema = Report.model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:core-rl:conformance-report:{SCHEMA_VERSION}",
        **schema,
    }
