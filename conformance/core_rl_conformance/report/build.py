"""Making a report from what a session has at its end."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from core_rl import __version__
from core_rl.machine import describe_machine
from core_rl.registry.engines import EngineEntry, list_engines
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl_conformance.catalogue import Check
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.model import CaseRecord, CheckRecord, EngineRecord, Environment, Report

__all__ = ["build_report", "describe_environment"]


def build_report(
    *,
    specs: Sequence[EngineSpec],
    checks: Iterable[Check],
    results: Sequence[CaseRecord],
    command: Sequence[str],
    seed: int,
    complete: bool,
    problems: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """The report of one session.

    ``specs`` are the engines under check; ``complete`` says that the command line left nothing out;
    ``problems`` are, by engine, further reasons against it.
    """
    known = sorted(map(_check, checks), key=lambda check: check.order)
    entries = {entry.name: entry for entry in list_engines()}
    engines = [
        _engine(
            spec,
            entries.get(spec.name),
            known,
            [case for case in results if case.engine == spec.name],
            tuple((problems or {}).get(spec.name, ())),
            complete=complete,
        )
        for spec in specs
    ]
    return Report(
        suite_version=__version__,
        protocol=PROTOCOL_VERSION,
        created=datetime.now(UTC).replace(microsecond=0),
        command=shlex.join(command),
        seed=seed,
        complete=complete,
        environment=describe_environment(engine.distribution for engine in engines),
        engines=tuple(engines),
        checks=tuple(known),
        results=tuple(results),
    )


def _engine(
    spec: EngineSpec,
    entry: EngineEntry | None,
    checks: Sequence[CheckRecord],
    cases: Sequence[CaseRecord],
    problems: tuple[str, ...],
    *,
    complete: bool,
) -> EngineRecord:
    return EngineRecord(
        name=spec.name,
        kind=spec.kind,
        description=spec.description,
        distribution=entry.distribution if entry else "(this process)",
        version=entry.version if entry else "-",
        protocol=spec.protocol,
        capabilities=certify(spec.capabilities, cases, needs_of(checks, spec.kind)),
        verdict=judge(cases, problems, complete=complete),
        problems=problems,
    )


def _check(check: Check) -> CheckRecord:
    return CheckRecord(
        identifier=check.identifier,
        kind=check.kind,
        partner=check.partner,
        description=check.description,
        requires=tuple(sorted(check.requires)),
        provisional=check.provisional,
    )


def describe_environment(distributions: Iterable[str] = ()) -> Environment:
    """This process and machine, with the versions of ``distributions`` and of what they and core-rl require."""
    return Environment(**dataclasses.asdict(describe_machine(distributions, extra="conformance")))
