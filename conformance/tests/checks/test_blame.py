"""Pairs of engines: the wrong engine fails, and its partner does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mutants.attack import PARTNERS
from mutants.inference_pairs import PenalizesGreedyRepetition, ScoresRoundedToHalf
from mutants.pairs import (
    EntropyInBits,
    LossScaleOfTheSecondStep,
    NormAfterClipping,
    RoundsWhatItSaves,
    WrapsTheNamesOfMasters,
)
from mutants.unruly import DiesInEvaluation
from mutants.zoo import DP1, make_engine, run_check, spec_of

from core_rl.reference import SPEC as REFERENCE
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.engines import register_engine
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.checks.pairs import pair_named, pair_scalars, verify_pair
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.profile import Profile, Setting
from core_rl_oracle.tolerance import Tolerance

pytest_plugins = ["pytester"]

ONE = Tolerance(baseline=0.0, floor=1.0)


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values"), make_engine=make_engine) as made:
        yield made


@pytest.fixture
def subject(expected_values: ExpectedValues, tmp_path: Path) -> EngineUnderTest:
    """``reference`` compared with an engine called ``other``, neither of which is started."""
    profile = Profile()
    case = Case(
        check=load_checks()["I1.pair-gradients"],
        target=Target(spec=REFERENCE, profile=profile),
        setting=Setting(layout=DP1),
        family="llama",
        dtype="float32",
        seed=0,
        device="cpu",
        partner=Target(spec=replace(REFERENCE, name="other"), profile=profile),
        partner_setting=Setting(layout=DP1),
    )
    return EngineUnderTest(case, expected_values, tmp_path)


# ------------------------------------------------------------------ the judge


@pytest.mark.parametrize(("ours", "partner"), [(0.9, -0.9), (5.0, 5.0), (1.5, 0.0)])
def test_pair_tolerance_adds_both_engines(subject: EngineUnderTest, ours: float, partner: float) -> None:
    verify_pair(subject, [pair_scalars("the loss", ours, partner, 0.0, ONE)])
    (measured,) = subject.measurements
    assert measured.limit == 2.0 and measured.error == abs(ours - partner)


@pytest.mark.parametrize(
    ("error", "partner", "message"),
    [
        (3.0, 0.5, "within its tolerance: the loss by 5.0e-01 (allowed 1.0e+00); fix 'reference'"),
        (float("nan"), 0.0, "fix 'reference'"),
        (-3.0, 2.0, "'other' is off as well: the loss by 2.0e+00 (allowed 1.0e+00); fix both"),
    ],
)
def test_wrong_engine_fails(subject: EngineUnderTest, error: float, partner: float, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        verify_pair(subject, [pair_scalars("the loss", error, partner, 0.0, ONE)])
    assert "'reference' is off the oracle: the loss by" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("partner", [3.5, float("nan")])
def test_an_engine_does_not_fail_for_its_partner(subject: EngineUnderTest, partner: float) -> None:
    with pytest.raises(NotRun, match="the partner 'other' is off the oracle: the loss by"):
        verify_pair(subject, [pair_scalars("the loss", 0.5, partner, 0.0, ONE)])
    assert not subject.measurements


def test_partner_fault_does_not_hide_engine_fault(subject: EngineUnderTest) -> None:
    quantities = [pair_scalars("the loss", 0.0, 3.0, 0.0, ONE), pair_scalars("the norm", 2.5, 0.0, 0.0, ONE)]
    with pytest.raises(AssertionError, match="'reference' is off the oracle: the norm"):
        verify_pair(subject, quantities)


def test_unknown_tensor_names_blame_sender(subject: EngineUnderTest) -> None:
    right, allowed = {"a": torch.zeros(2)}, {"a": ONE}
    wrong = {"b": torch.zeros(2)}
    with pytest.raises(NotRun, match="'other'"):
        verify_pair(subject, [pair_named("gradients", right, wrong, right, allowed)])
    with pytest.raises(AssertionError, match="missing: a"):
        verify_pair(subject, [pair_named("gradients", wrong, right, right, allowed)])


# ------------------------------------------------------------- whole checks


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("broken", "identifier", "message"),
    [
        (EntropyInBits, "I7.pair-logprobs", "'entropy-in-bits' is off the oracle: entropy by"),
        (NormAfterClipping, "I1.pair-gradients", "is off the oracle: the norm before clipping by"),
        (LossScaleOfTheSecondStep, "I1.pair-training", "is off the oracle: the norm of step 1 by"),
        (RoundsWhatItSaves, "I11.pair-portable", "is wrong: master in the portable checkpoint"),
        (WrapsTheNamesOfMasters, "I11.pair-portable", "names that only the engine .* has: lm_head"),
        (DiesInEvaluation, "I7.pair-logprobs", "'dies-in-evaluation' failed: RankDied"),
        (ScoresRoundedToHalf, "I7.pair-scores", "'scores-rounded-to-half' is off the oracle: scores"),
        (PenalizesGreedyRepetition, "I8.pair-greedy", "'penalizes-greedy-repetition' is off the oracle"),
    ],
)
def test_correct_engine_passes_with_broken_partner(
    expected_values: ExpectedValues,
    broken: type[ReferenceBackend | ReferenceRolloutBackend],
    identifier: str,
    message: str,
    tmp_path: Path,
) -> None:
    partner = spec_of(broken)
    try:
        with pytest.raises(NotRun, match=message):
            run_check(
                expected_values,
                identifier,
                PARTNERS[partner.kind],
                layout=DP1,
                family="llama",
                directory=tmp_path,
                partner=partner,
            )
    finally:
        expected_values.discard(partner.name)


@pytest.mark.nightly
def test_session_fails_only_the_wrong_engine(pytester: pytest.Pytester) -> None:
    spec = spec_of(EntropyInBits)
    names = f"--engine={spec.name}", "--engine=reference"
    with register_engine(spec):
        result = pytester.runpytest_inprocess(
            "-p", "no:cacheprovider", *names, "--pyargs", "core_rl_conformance", "-k", "I7.pair", "-rs"
        )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*'reference' is within its tolerance: entropy by *; fix 'entropy-in-bits'*",
            "engine entropy-in-bits: 0 passed, 1 failed, *",
            "engine reference: 0 passed, 0 failed, 0 not supported, 0 waived, 1 not run",
            "*the partner 'entropy-in-bits' is off the oracle: entropy by *",
        ]
    )
