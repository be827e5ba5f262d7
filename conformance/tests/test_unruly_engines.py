"""Engines that die, hang or answer nonsense: the session names them, continues, and leaves nothing behind."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from group_support import survivors
from mutants import unruly
from mutants.zoo import CAPABILITIES
from plugin_support import children, engine, run, run_checks

from core_rl.config.layout import ParallelLayout
from core_rl.reference import SPEC
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.engines import register_engine
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.procedures import serving
from core_rl_conformance.profile import DENSE, Profile
from core_rl_conformance.session.matrix import FULL

__all__ = ["engine"]

pytest_plugins = ["pytester"]

SAYS = {
    unruly.DiesInEvaluation: "*RankDied: rank 0 ended with exit code 3 during forward*",
    unruly.CrashesInEvaluation: "*last line of the engine: *unruly.py, line *, in run",
    unruly.RaisesInEvaluation: "*last line of the engine: *unruly.py, line *, in run: torch.nn.functional.linear(*",
    unruly.ExitsInEvaluation: "*rank 0 *",
    unruly.WrongShape: "*EngineContractError: *logprobs*",
    unruly.WrongDtype: "*EngineContractError: *float64*",
    unruly.NotANumber: "*'logprobs' is NaN or infinite at * of 217 tokens*",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", SAYS, ids=lambda kind: kind.__name__)
def test_failing_check_does_not_stop_session(
    pytester: pytest.Pytester, engine: Callable[..., EngineSpec], kind: type[ReferenceBackend]
) -> None:
    spec = engine(kind)
    before = children()
    result = run_checks(pytester, spec.name, "I7.logprobs or contract.version", "--model=llama")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert sum(result.parseoutcomes().get(name, 0) for name in ("passed", "failed")) == 2
    result.stdout.fnmatch_lines([f"I7.logprobs: engine '{spec.name}', layout dp1*", SAYS[kind]])
    assert children() <= before


def test_hanging_engine_is_left_out(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    spec = engine(unruly.HangsInEvaluation)
    before = children()
    result = run_checks(pytester, spec.name, "I7.lo", "--model=llama", "--call-timeout=4", "-rs")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2, skipped=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        [
            "*RankTimeout: ranks [[]0] of 1 did not answer forward within 4 s*",
            "*unruly.py*in run*",
            "*it hung in 2 checks at dp1 before*",
        ]
    )
    assert children() <= before


def test_lost_requests_end_the_session(
    pytester: pytest.Pytester, engine: Callable[..., EngineSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(serving, "TOKEN_S", 0.0)
    spec = engine(unruly.LosesEveryThird)
    result = run_checks(pytester, spec.name, "I8. and dp1", "-rs")
    assert result.parseoutcomes()["failed"] == 2 and result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*LostRequests: * of * requests were answered within 2 s; unanswered, by the order of sending: 3*",
            "*the engine loses requests: in 2 checks before*",
        ]
    )


@pytest.mark.parametrize(
    ("kind", "check", "lines"),
    [
        (
            unruly.LacksAKey,
            "I8.rollout-temperature",
            ["*last line of the engine: *unruly.py*", "*KeyError: 'prompt'"],
        ),
        (
            unruly.RefusesGemma,
            "I20.adamw",
            ["*UnsupportedCapability: the profile *:PROFILE_* promises more than the engine has*gemma2*"],
        ),
    ],
)
def test_any_error_has_header_and_advice(
    pytester: pytest.Pytester,
    engine: Callable[..., EngineSpec],
    kind: type[ReferenceBackend | ReferenceRolloutBackend],
    check: str,
    lines: list[str],
) -> None:
    spec = engine(kind, Profile(families=("gemma2",)))
    result = run_checks(pytester, spec.name, check)
    result.stdout.fnmatch_lines(
        [
            f"{check}: engine '{spec.name}', layout dp1, model gemma2 *",
            *lines,
            "  required: *",
            "  look at: *",
            "  see: *",
        ]
    )


def test_children_end_with_dead_engine(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    spec = engine(unruly.LeavesAChild)
    result = run_checks(pytester, spec.name, "I7.logprobs and llama")
    result.assert_outcomes(failed=1, deselected=None)
    pids = {int(pid) for pid in re.findall(rf"{unruly.CHILD} (\d+)", result.stdout.str())}
    assert len(pids) == 1
    assert not survivors([*pids])


@pytest.mark.nightly
def test_disagreeing_ranks_are_detected(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    layouts = Profile(layouts=(ParallelLayout(), ParallelLayout(dp=2)))
    spec = engine(unruly.RanksDisagree, layouts, CAPABILITIES)
    result = run_checks(pytester, spec.name, "I7.logprobs")
    result.stdout.fnmatch_lines(
        ["I7.logprobs: engine 'ranks-disagree', layout dp2*", "*data-parallel rank 1*"]
    )
    assert result.parseoutcomes()["failed"] == math.ceil(len(DENSE) / FULL)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("nowhere_at_all:Engine", "*engine 'broken'*nowhere_at_all*"),
        ("mutants.unruly:Missing", "*engine 'broken'*Missing*"),
        ("mutants.unruly:CHILD", "*engine 'broken'*must be a subclass*"),
        ("mutants.unruly:RunsAsACoroutine", "*engine 'broken'*run() must not be an 'async def'*"),
    ],
)
def test_unimportable_engine_is_named_once(pytester: pytest.Pytester, factory: str, says: str) -> None:
    with register_engine(replace(SPEC, name="broken", factory=factory)):
        result = run(pytester, "--engine=broken", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])
