"""The order of checks, and the failure to fix first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from report_support import case

from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.session.order import BASICS, failing_models, level, lines_of, mendings

FAILED = Outcome.FAILED
CAUSE = "I: x\n  differs\n  it looks like: the temperature 0.8 is left out"
OTHER = "I: x\n  differs\n  it looks like: the temperature 0.5 is left out"


def _failed(check: str, message: str = "I: x\n  differs", **place: str) -> CaseRecord:
    return case(check, FAILED, message=message, **place)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        # with its model, or else at its layout, or else at all
        ([_failed("I11.resume"), _failed("I7.logprobs")], {"I7.logprobs": ["I11.resume"]}),
        ([_failed("I1.gradients", model="gpt2"), _failed("I7.logprobs")], {"I7.logprobs": ["I1.gradients"]}),
        ([_failed("I1.gradients", layout="dp2"), _failed("I7.logprobs")], {"I7.logprobs": ["I1.gradients"]}),
        (
            [
                _failed("I1.gradients", model="gpt2"),
                case("I7.logprobs", model="gpt2"),
                _failed("I7.logprobs"),
            ],
            {"I7.logprobs": [], "I1.gradients": []},
        ),
        # one failure elsewhere is a fault of its own
        (
            [
                _failed("I1.gradients"),
                case("I1.gradients", layout="dp2"),
                _failed("I20.adamw"),
                _failed("I20.adamw", layout="dp2"),
            ],
            {"I1.gradients": [], "I20.adamw": []},
        ),
        # capabilities, kinds and rules of the interface
        (
            [_failed("I12.receive-disk"), _failed("I12.updates"), _failed("I7.score")],
            {"I12.receive-disk": ["I12.updates"], "I7.score": []},
        ),
        ([_failed("I7.logprobs"), _failed("I8.sampling")], {"I7.logprobs": [], "I8.sampling": []}),
        ([_failed("I7.logprobs"), _failed("contract.order")], {"I7.logprobs": [], "contract.order": []}),
        # over a basic check that has the cause of another
        (
            [_failed("I1.logits-gradients", CAUSE), _failed("I1.gradients", OTHER), _failed("I20.adamw")],
            {"I1.gradients": ["I20.adamw", "I1.logits-gradients"]},
        ),
        # one cause
        ([_failed("contract.order", CAUSE), _failed("I10.files", OTHER)], {"contract.order": ["I10.files"]}),
        ([case("I7.logprobs", Outcome.WAIVED), _failed("I1.gradients")], {"I1.gradients": []}),
    ],
)
def test_first_failure_is_named(results: Sequence[CaseRecord], expected: dict[str, list[str]]) -> None:
    mending = mendings(results, load_checks())
    assert {one.check: list(one.after) for one in mending} == expected
    assert bool(lines_of(mending)) == any(expected.values())


def test_lines_have_symptoms_and_followers() -> None:
    mending = mendings([_failed("I7.logprobs", CAUSE), _failed("I1.gradients")], load_checks())
    assert lines_of(mending) == ["1. I7.logprobs: the temperature 0.8 is left out; then again: I1.gradients"]


@pytest.mark.parametrize(
    ("failures", "elsewhere", "line"),
    [
        (3, [case("I7.logprobs")], "all 3 cases of gemma2 failed: leave it out of the profile's `families`"),
        (3, [], ""),  # the engine may serve no model right
        (3, [case("I7.logprobs"), case("I7.logprobs", model="gemma2")], ""),
        (2, [case("I7.logprobs")], ""),
    ],
)
def test_a_model_without_a_pass_is_named(failures: int, elsewhere: list[CaseRecord], line: str) -> None:
    lines = failing_models([*elsewhere, *[_failed("I1.gradients", model="gemma2")] * failures])
    assert len(lines) == bool(line)
    assert "".join(lines).startswith(line)


def test_basic_checks_run_before_checkpoints() -> None:
    checks = load_checks()
    assert set(BASICS) <= set(checks)
    assert level(checks["I7.logprobs"]) < level(checks["I1.micro-batches"]) < level(checks["I11.resume"])
