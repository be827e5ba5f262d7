"""Which capabilities results certify, and the verdict."""

from __future__ import annotations

import pytest
from report_support import CHECKS, case

from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.model import CapabilityState, Verdict

NEEDS = needs_of(CHECKS, "train")
CERTIFIED, NOT_CERTIFIED, UNCERTIFIED = CapabilityState

CASES = [
    ([case("I10.value")], CERTIFIED, ""),
    ([case("I10.value"), case("I10.value", Outcome.FAILED, layout="dp2")], NOT_CERTIFIED, "I10.value failed"),
    (
        [case("I10.value"), case("I10.value", Outcome.WAIVED, layout="dp2")],
        NOT_CERTIFIED,
        "I10.value is waived",
    ),
    (
        [case("I10.value"), case("I10.value", Outcome.NOT_RUN, layout="dp2", reason="2 GPUs")],
        UNCERTIFIED,
        "I10.value was not run: 2 GPUs",
    ),
    ([case("I10.value", Outcome.NOT_SUPPORTED)], UNCERTIFIED, "no check of it was run"),
    ([case()], UNCERTIFIED, "no check of it was run"),
    # Another check showed the capability, and its own check was left out.
    ([case(capabilities=("value_head",))], UNCERTIFIED, "I10.value was not selected"),
    # For want of another capability: it proves nothing about this capability.
    ([case("I10.value"), case("I10.value", Outcome.NOT_SUPPORTED, layout="dp2")], CERTIFIED, ""),
]


def test_layout_needs_all_checks() -> None:
    capabilities = ("data_parallel",)
    some = [case("I10.value", capabilities=capabilities)]
    every = [case(check.identifier, capabilities=capabilities) for check in CHECKS if check.kind == "train"]
    pair = [case("I10.value", capabilities=capabilities, partner="other")]
    (narrow,), (full,), (beside,) = (certify(capabilities, cases, NEEDS) for cases in (some, every, pair))
    assert (narrow.state, full.state, beside.state) == (UNCERTIFIED, CERTIFIED, UNCERTIFIED)
    assert narrow.reason.endswith("was not selected")


def test_layout_needs_cases_of_its_own() -> None:
    names = [check.identifier for check in CHECKS if check.kind == "train"]
    needs = NEEDS | {names[0]: ["tensor_parallel"]}
    own = case(names[0], capabilities=("tensor_parallel",))
    (layout,) = certify(["tensor_parallel"], [own, *map(case, names[1:])], needs)
    assert (layout.state, layout.reason) == (UNCERTIFIED, "no layout with it was run")


def test_missing_package_does_not_block_layouts() -> None:
    capabilities = ("data_parallel",)
    every = [case(check.identifier, capabilities=capabilities) for check in CHECKS if check.kind == "train"]
    missing = case(
        "I10.value", Outcome.NOT_RUN, capabilities=(*capabilities, "value_head"), reason="needs a package"
    )
    cases = [*every, missing]
    states = {part.name: part.state for part in certify([*capabilities, "value_head"], cases, NEEDS)}
    assert states == {"data_parallel": CERTIFIED, "value_head": UNCERTIFIED}
    ran = case(
        "I10.value", capabilities=("value_head",)
    )  # then the other one is missing at this layout alone
    (layout, _) = certify([*capabilities, "value_head"], [*cases, ran], NEEDS)
    assert layout.state == UNCERTIFIED


@pytest.mark.parametrize(("cases", "state", "reason"), CASES)
def test_capability_needs_all_its_checks(
    cases: list[CaseRecord], state: CapabilityState, reason: str
) -> None:
    (capability,) = certify(["value_head"], cases, NEEDS)
    assert (capability.name, capability.state, capability.reason) == ("value_head", state, reason)


def test_only_declared_capabilities_are_judged_in_order() -> None:
    capabilities = certify({"value_head", "cuda"}, [case("I10.value")], NEEDS)
    assert [(part.name, part.state) for part in capabilities] == [
        ("cuda", UNCERTIFIED),
        ("value_head", CERTIFIED),
    ]
    assert "--device=cuda" in capabilities[0].reason


def test_foreign_checks_are_not_needed() -> None:
    inference = CHECKS[1].model_copy(update={"kind": "inference"})
    assert needs_of([CHECKS[1], inference.model_copy(update={"identifier": "I10.other"})], "train") == {
        "I10.value": ("value_head",)
    }


VERDICTS = [
    ([case()], (), True, Verdict.PASSED),
    ([case()], (), False, Verdict.PARTIAL),
    ([case(), case("I10.value", Outcome.FAILED)], (), True, Verdict.FAILED),
    ([case(), case("I10.value", Outcome.WAIVED)], (), True, Verdict.PASSED),
    ([case()], ("it declares 'moe', and no check of that was executed",), True, Verdict.FAILED),
    ([case(outcome=Outcome.NOT_RUN)], (), True, Verdict.NOT_RUN),
    ([], ("no check was executed",), True, Verdict.NOT_RUN),
]


@pytest.mark.parametrize(("cases", "problems", "complete", "verdict"), VERDICTS)
def test_the_verdict(
    cases: list[CaseRecord], problems: tuple[str, ...], complete: bool, verdict: Verdict
) -> None:
    assert judge(cases, problems, complete=complete) is verdict


@pytest.mark.parametrize(
    ("checks", "dp", "claims"),
    [
        (["I7.rollout-logprobs"], 1, []),
        (["I7.logprobs", "I20.bfloat16-steps"], 1, ["master weights"]),
        (["I20.bfloat16-sums", "I20.bfloat16-rotary"], 1, ["sums of gradients", "rotary positions"]),
        (["I20.bfloat16-sums"], 2, ["sums of gradients", "over ranks"]),
    ],
)
def test_bfloat16_claims_what_checks_judged(checks: list[str], dp: int, claims: list[str]) -> None:
    capabilities = ("bfloat16", "data_parallel")[:dp]
    cases = [case(check, capabilities=capabilities, dtype="bfloat16") for check in checks]
    (record,) = certify(["bfloat16"], cases, {})
    every = ["master weights", "sums of gradients", "over ranks", "final norm", "rotary positions"]
    assert [claim for claim in every if claim in record.meaning] == claims
    assert "4 times the rounding error" in record.meaning
    (failed,) = certify(["bfloat16"], [*cases, case(outcome=Outcome.FAILED, capabilities=capabilities)], {})
    assert failed.meaning == ""
