"""Reports to test with, made without running anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from core_rl.machine import Machine
from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord, Outcome
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.model import CheckRecord, CodeRecord, EngineRecord, Report

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
CHECKS = (
    CheckRecord(
        identifier="I2.logprobs",
        kind="train",
        description="The log-prob of every token is the oracle's,\nat ``T``.\n\nWhy: #1.\nLook at: the <head>.",
        requires=(),
    ),
    CheckRecord(
        identifier="I10.value",
        kind="train",
        description="Values.\n\nWhy: #2.\nLook at: it.",
        requires=("value_head",),
    ),
)


def measured(
    error: float, limit: float = 1e-5, points: tuple[tuple[float, float], ...] = ()
) -> MeasurementRecord:
    """One comparison."""
    return MeasurementRecord(what="logprobs", error=error, limit=limit, points=points)


def case(check: str = "I2.logprobs", outcome: Outcome = Outcome.PASSED, **changes: Any) -> CaseRecord:
    """A case of the engine ``mine`` that passed with a tenth of its limit."""
    fields: dict[str, Any] = {
        "check": check,
        "engine": "mine",
        "layout": "dp1",
        "model": "qwen3",
        "dtype": "float32",
        "seed": 0,
        "outcome": outcome,
        "seconds": 0.5,
        "capabilities": ("value_head",) if check == "I10.value" else (),
        "measurements": (measured(1e-6),) if outcome.executed else (),
    }
    return CaseRecord(**(fields | changes))


def report(
    *cases: CaseRecord,
    hours: float = 0,
    complete: bool = True,
    declared: Sequence[str] = ("value_head",),
    version: str = "0.1.0",
    problems: tuple[str, ...] = (),
    code: str = "c0de",
    suite: str = "5417e",
) -> Report:
    """A report of all engines that ``cases`` name, ``hours`` after the first."""
    names = list(dict.fromkeys(case.engine for case in cases)) or ["mine"]
    return Report(
        suite_version="0.1.0",
        suite_code=CodeRecord(digest=suite),
        protocol=(0, 3),
        created=NOON + timedelta(hours=hours),
        command="pytest --engine=mine --pyargs core_rl_conformance",
        seed=0,
        complete=complete,
        environment=Machine(
            python="CPython 3.11.7",
            system="Linux 6.1",
            processor="a processor",
            cores=2,
            threads=1,
            gpus=(),
            packages={"core-rl": "0.1.0", "torch": "2.13.0"},
        ),
        engines=tuple(
            _engine(name, [c for c in cases if c.engine == name], complete, declared, version, problems, code)
            for name in names
        ),
        checks=CHECKS,
        results=cases,
    )


def _engine(
    name: str,
    cases: Sequence[CaseRecord],
    complete: bool,
    declared: Sequence[str],
    version: str,
    problems: tuple[str, ...],
    code: str,
) -> EngineRecord:
    return EngineRecord(
        name=name,
        kind="train",
        description="An engine & a half",
        distribution=f"core-rl-{name}",
        version=version,
        code=CodeRecord(digest=code, commit="1234567890abcdef-dirty"),
        protocol=(0, 3),
        capabilities=certify(declared, cases, needs_of(CHECKS, "train")),
        verdict=judge(cases, problems, complete=complete),
        problems=problems,
    )


FAILED = case(
    "I10.value",
    Outcome.FAILED,
    measurements=(measured(math.inf), measured(1e-6)),
    message="I10.value: engine 'mine'\n  values differ by <inf> & more",
    reproduction="import torch  # nothing <else>",
)
EVERYTHING = report(
    case(measurements=(measured(1e-6, points=((-1.0, -1.0), (-2.5, -2.500001))),)),
    case(layout="dp2", measurements=(measured(0.0, 0.0),)),
    FAILED,
    case("I10.value", Outcome.WAIVED, layout="dp2", reason="waived: mine#3 (owner: ann)", message="boom"),
    case("I10.value", Outcome.NOT_SUPPORTED, engine="other", reason="undeclared: value_head"),
    case(engine="other", outcome=Outcome.NOT_RUN, reason="no GPU"),
)
"""Two engines and all five outcomes."""
