"""The report as data: its file format, its schema, and derived values."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from report_support import EVERYTHING, case, measured, report

from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord, Outcome
from core_rl_conformance.report.model import SCHEMA_VERSION, CheckRecord, Report, Verdict, report_schema

DIGESTS = {"1.5": "9fa10611201a"}
"""Beginnings of the digests of schemas, by version."""


def test_json_and_back_loses_nothing() -> None:
    assert Report.model_validate_json(EVERYTHING.model_dump_json()) == EVERYTHING


@given(error=st.floats(), limit=st.floats(min_value=0))
def test_json_is_standard_whatever_was_measured(error: float, limit: float) -> None:
    text = measured(error, limit).model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    read = MeasurementRecord.model_validate_json(text)
    assert (read.error == error or (math.isnan(read.error) and math.isnan(error))) and read.limit == limit


def test_another_schema_has_another_version() -> None:
    digest = hashlib.sha256(json.dumps(report_schema(), sort_keys=True).encode()).hexdigest()
    assert digest.startswith(DIGESTS[SCHEMA_VERSION]), (
        f"the schema has the digest {digest[:12]}; raise SCHEMA_VERSION if older readers refuse the new files"
    )


@pytest.mark.parametrize("record", [EVERYTHING.results[0], EVERYTHING.checks[0]])
def test_older_records_were_never_provisional(record: CaseRecord | CheckRecord) -> None:
    values = record.model_dump()
    assert "provisional" not in values
    assert type(record).model_validate({**values, "provisional": False}) == record
    with pytest.raises(ValidationError):
        type(record).model_validate({**values, "provisional": True})


def test_schema_describes_every_field() -> None:
    schema = report_schema()
    written = json.loads(EVERYTHING.model_dump_json())
    assert set(written) == set(schema["properties"]) == set(schema["required"])
    for part, name in (("results", "CaseRecord"), ("engines", "EngineRecord"), ("checks", "CheckRecord")):
        definition = schema["$defs"][name]
        assert all(set(item) == set(definition["properties"]) for item in written[part])
        assert definition["additionalProperties"] is False


def test_schema_allows_infinite_errors() -> None:
    allowed = report_schema()["$defs"]["MeasurementRecord"]["properties"]["error"]["anyOf"]
    assert {"type": "number"} in allowed and "Infinity" in allowed[1]["enum"]


@pytest.mark.parametrize(
    "change", [{"surprise": 1}, {"schema_version": "0.9"}, {"engines": []}, {"checks": []}]
)
def test_inconsistent_or_unknown_content_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Report.model_validate({**EVERYTHING.model_dump(), **change})


def test_a_record_travels_as_a_property() -> None:
    result = CaseRecord(
        check="I2.logprobs",
        engine="mine",
        layout="dp1",
        model="qwen3",
        dtype="float32",
        seed=3,
        outcome=Outcome.WAIVED,
        seconds=1.5,
        capabilities=("cuda",),
        measurements=(
            MeasurementRecord(what="a", error=2.0, limit=1.0, points=((-1.5, -1.0),)),
            MeasurementRecord(what="b", error=9.0, limit=9.0),
        ),
        reason="known",
    )
    record = result.model_copy(update={"message": "boom"})
    assert record.worst is not None and record.worst.what == "a" and record.worst.ratio == 2.0
    assert (record.outcome, record.seed, record.capabilities) == (Outcome.WAIVED, 3, ("cuda",))
    assert (record.reason, record.message, record.place) == ("known", "boom", "dp1-qwen3-float32")
    assert record.measurements[0].points == ((-1.5, -1.0),)
    assert CaseRecord.from_properties([("other", 1), result.to_property()]) == result
    assert CaseRecord.from_properties([("other", 1)]) is None


def test_slowest_ten_are_sorted() -> None:
    cases = [case(seed=number, seconds=float(number)) for number in range(12)]
    skipped = case(outcome=Outcome.NOT_RUN, seconds=99.0)
    assert [slow.seed for slow in report(skipped, *cases).slowest] == list(range(11, 1, -1))


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([case()], Verdict.PASSED),
        ([case(), case("I10.value", Outcome.FAILED, engine="other")], Verdict.FAILED),
        ([case(), case(outcome=Outcome.NOT_RUN, engine="other")], Verdict.NOT_RUN),
    ],
)
def test_worst_engine_decides_verdict(cases: list[CaseRecord], verdict: Verdict) -> None:
    assert report(*cases).verdict is verdict


def test_checks_are_titled_and_ordered() -> None:
    first, second = EVERYTHING.checks
    assert first.title == "The log-prob of every token is the oracle's, at ``T``."
    assert first.paragraphs[1:] == ["Why: #1.", "Look at: the <head>."]
    contract = first.model_copy(update={"identifier": "contract.order"})
    assert sorted([contract, second, first], key=lambda check: check.order) == [first, second, contract]
