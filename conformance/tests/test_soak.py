"""The soak finds faults that begin behind a threshold, and shows the smallest calls that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from mutants.bases import Packed
from mutants.thresholds import (
    THRESHOLDS,
    FifthEqualTokenIsSure,
    HalfRateFrom24Updates,
    MicroBatchesBehind32,
    ThirdCallDropsTwo,
    ZeroFromPosition1023,
)
from mutants.zoo import DP1, make_engine, spec_of
from plugin_support import run

from core_rl.config.capability import Capability
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import Check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.inputs.drawn import LONGEST, MOST_TOKENS, Cut, Sequences, Start, sequences
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.profile import Profile, Setting
from core_rl_conformance.session import items
from core_rl_conformance.soak import EngineCalls, Soak, soak_check

pytest_plugins = ["pytester"]

FOREVER_S = 600.0
"""A fault is known to be met earlier with the seed of these tests."""
START = Start("llama", 0, deep=False, rate=1e-3, clip=None, frozen=False)
ONE = Sequences(1, 8, "drawn", "all", 0)


@contextmanager
def _subject(engine: type[Packed], directory: Path) -> Iterator[EngineUnderTest]:
    case = Case(
        check=soak_check(FOREVER_S),
        target=Target(spec=spec_of(engine), profile=Profile(families=("llama", "gpt2"))),
        setting=Setting(layout=DP1),
        family="llama",
        dtype="float32",
        seed=7,
        device="cpu",
    )
    with ExpectedValues(directory, make_engine=make_engine) as expected_values:
        yield EngineUnderTest(case, expected_values, directory / "cases")


def _calls(engine: type[Packed], directory: Path, act: Callable[[EngineCalls], None]) -> None:
    with _subject(engine, directory) as subject:
        calls = _begun(subject)
        act(calls)
        calls.teardown()


def _begun(subject: EngineUnderTest) -> EngineCalls:
    """Calls without hypothesis."""
    soak = Soak(subject, time.monotonic() + FOREVER_S)
    calls: EngineCalls = type("Calls", (EngineCalls,), {"soak": soak})()
    calls.begin(START)
    return calls


def _forward(drawn: Sequences) -> Callable[[EngineCalls], None]:
    return lambda calls: calls.forward(drawn, Cut(1), 1.0, frozenset({"logprobs"}))


BELOW_AND_BEHIND: list[tuple[type[Packed], Callable[[EngineCalls], None], Callable[[EngineCalls], None]]] = [
    (
        ThirdCallDropsTwo,
        lambda calls: calls.forward_backward(ONE, Cut(1), 2),
        lambda calls: calls.forward_backward(ONE, Cut(1), 3),
    ),
    (
        HalfRateFrom24Updates,
        lambda calls: calls.train(ONE, 16, Cut(1), TokenMeanLoss(), True),
        lambda calls: calls.train(ONE, 31, Cut(1), TokenMeanLoss(), True),
    ),
    (
        ZeroFromPosition1023,
        _forward(Sequences(1, 1023, "drawn", "all", 0)),
        _forward(Sequences(1, 1024, "drawn", "all", 0)),
    ),
    (
        FifthEqualTokenIsSure,
        _forward(Sequences(1, 4, "equal", "all", 0)),
        _forward(Sequences(1, 8, "equal", "all", 0)),
    ),
    (
        MicroBatchesBehind32,
        lambda calls: calls.forward_backward(Sequences(64, 2, "drawn", "all", 0), Cut(32), 1),
        lambda calls: calls.forward_backward(Sequences(64, 2, "drawn", "all", 0), Cut(33), 1),
    ),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("engine", "below", "behind"), BELOW_AND_BEHIND)
def test_calls_fail_behind_the_threshold_only(
    engine: type[Packed],
    below: Callable[[EngineCalls], None],
    behind: Callable[[EngineCalls], None],
    tmp_path: Path,
) -> None:
    _calls(engine, tmp_path / "below", below)
    with pytest.raises(AssertionError, match=r"contract\.soak"):
        _calls(engine, tmp_path / "behind", behind)


def test_every_kind_of_call_follows_the_oracle(tmp_path: Path) -> None:
    def act(calls: EngineCalls) -> None:
        calls.forward(ONE, Cut(2), 0.8, frozenset({"logprobs", "entropy", "logits"}))
        calls.eval_batch(ONE, Cut(1), TokenMeanLoss())
        calls.train(ONE, 2, Cut(1), TokenMeanLoss(), False)
        calls.forward_backward_of_loss(ONE, Cut(1), 2, TokenMeanLoss(temperature=0.5))
        calls.save_and_load("portable", ONE)
        calls.save_and_load("sharded", ONE)
        calls.load_weights(3)
        calls.offload()
        calls.forward(ONE, Cut(1), 1.0, frozenset({"logprobs"}))

    _calls(Packed, tmp_path, act)


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "calls"), THRESHOLDS)
def test_threshold_is_met_and_reduced(engine: type[Packed], calls: str, tmp_path: Path) -> None:
    with _subject(engine, tmp_path) as subject, pytest.raises(AssertionError, match=calls):
        subject.case.check.function(subject)


def test_undeclared_logits_are_not_asked_for(tmp_path: Path) -> None:
    with _subject(Packed, tmp_path) as subject:
        spec = replace(subject.spec, capabilities=subject.spec.capabilities - {Capability.LOGITS})
        target = replace(subject.case.target, spec=spec)
        without = EngineUnderTest(replace(subject.case, target=target), subject.expected, tmp_path / "cases")
        calls = _begun(without)
        calls.forward(ONE, Cut(1), 1.0, frozenset({"logits"}))


def test_soaks_of_a_session_share_its_time(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = list[float]()

    def noted(seconds: float) -> Check:
        shares.append(seconds)
        return soak_check(seconds)

    monkeypatch.setattr(items, "soak_check", noted)
    options = ["--soak=3", "--collect-only", "--layout=dp1", "--layout=dp2"]
    result = run(pytester, "--engine=reference", "--engine=fsdp", *options, "--pyargs", "core_rl_conformance")
    count = sum("contract.soak[" in line for line in result.outlines)
    assert count > 2  # of fsdp in bfloat16 as well
    assert shares == [180.0, 180.0 / count]


def test_soak_without_train_engine_is_refused(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--engine=reference-rollout", "--soak=1", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--soak: reference-rollout: no train engine*"])


@given(sequences())
def test_sequences_keep_to_their_sizes(drawn: Sequences) -> None:
    data = drawn.data(vocab_size=11, times=2)
    assert len(data.order) == 2 * drawn.number
    assert len(data.distinct.rows) == min(3, drawn.number)
    assert max(data.all.lengths) == drawn.length <= LONGEST
    assert sum(data.all.lengths) <= 2 * MOST_TOKENS
