"""A correct tensor-parallel engine passes every check; the zoo holds what breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from toy_tp import PROFILE, SPEC
from toy_tp.engine import partial_gradient

from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import LayoutError
from core_rl.registry.engines import register_engine
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.session.matrix import Selection, cases

pytest_plugins = ["pytester"]

TARGET = Target(spec=SPEC, profile=PROFILE)
TP2 = ParallelLayout(tp=2)
FIRST = {"I7.logprobs", "I4.grad-norm"}
"""Checks of a daily run: outputs, gradients and the norm over shards."""
WITH_DATA_PARALLEL = {
    "I1.gradients",
    "I2.data-parallel",
    "I4.grad-norm",
    "I7.logprobs",
    "I11.other-layout",
    "I20.adamw",
}
"""Checks that see more in two dimensions than in one."""
WITH_SEQUENCE_PARALLEL = {
    "I1.any-batch",
    "I1.gradients",
    "I1.train-batch",
    "I3.gradients-after-steps",
    "I4.grad-norm",
    "I7.logprobs",
    "I7.scores",
    "I1.combined-batches",
    "I20.adapter-gradients",
}
"""Checks that see the tokens of a batch on several ranks."""


def _cases(layout: str) -> Iterator[Case]:
    """One model for each check, taking turns, as in a quick session."""
    selection = Selection(layouts=(layout,), quick=True)
    for check in load_checks().values():
        yield from cases(check, TARGET, selection)


def _parameters() -> list[ParameterSet]:
    """All checks on ``tp2``, and on ``dp2tp2`` checks that need it."""
    required = [case for case in _cases("tp2") if case.check.min_dp == 1]
    required += [case for case in _cases("dp2tp2") if case.check.identifier in WITH_DATA_PARALLEL]
    required += [case for case in _cases("tp2sp") if case.check.identifier in WITH_SEQUENCE_PARALLEL]
    required = [case for case in required if not case.not_supported]
    quick = [case for case in required if case.layout == TP2 and case.check.identifier in FIRST]
    return [
        pytest.param(
            case,
            id=f"{case.check.identifier}-{case.layout}-{case.family}",
            marks=() if case in quick else pytest.mark.nightly,
        )
        for case in required
    ]


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values")) as made:
        yield made


@pytest.mark.parametrize("case", _parameters())
def test_correct_engine_passes(expected_values: ExpectedValues, case: Case, tmp_path: Path) -> None:
    assert not case.not_supported and not case.not_run
    case.check.function(EngineUnderTest(case, expected_values, tmp_path))


def _differing_replicas(engine: TrainEngine) -> list[str]:
    """Replicated parameters that are not the same bits on all ranks, and gradients of them likewise."""
    state = engine.backend.state()
    first = {
        f"{kind} {part.name}": part.tensor
        for kind in ("master", "grads")
        for part in state.local(kind)
        if part.shape == state.shapes(kind)[part.name]
    }
    ranks = engine.world.gather(first)
    assert len(ranks) == engine.world.size > 1 and all(first)
    return [
        name for name in first if not all(torch.equal(replica[name], ranks[0][name]) for replica in ranks)
    ]


@pytest.mark.nightly
def test_replicas_stay_bitwise_equal(expected_values: ExpectedValues, tmp_path: Path) -> None:
    """Replicas compared directly, which the suite only infers from gradients: so its mutants break something real."""
    case = next(case for case in _cases("dp2tp2") if case.family == "qwen3")
    subject = EngineUnderTest(case, expected_values, tmp_path)
    group = subject.start(optimizer={"lr": 2e-2})
    loss = TokenMeanLoss().spec()
    for seed in range(3):
        group.train_batch(subject.data(seed=seed).batch(), loss, MicroBatchSpec(count=2))
    group.forward_backward(subject.data().batch(), loss, MicroBatchSpec(count=2))
    group.named_tensors("grads")
    assert group.run(_differing_replicas) == [[]] * 4


def test_only_head_norms_have_partial_gradients() -> None:
    """Norms before column-parallel matrices see the summed gradient of their output already."""
    names = ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
    assert [partial_gradient(f"model.layers.0.{name}.weight") for name in names] == [True, True, False, False]
    assert not partial_gradient("model.norm.weight") and not partial_gradient("score.weight")


@pytest.mark.nightly
def test_indivisible_heads_are_refused(expected_values: ExpectedValues, tmp_path: Path) -> None:
    case = replace(next(_cases("tp2")), family="llama")
    with pytest.raises(LayoutError, match=r"tp=3 must divide the attention and key/value heads \(4, 2\)"):
        EngineUnderTest(case, expected_values, tmp_path).start(layout=ParallelLayout(tp=3))


@pytest.mark.nightly
def test_a_session_runs_the_layouts_of_the_profile(pytester: pytest.Pytester) -> None:
    """Through the plugin; a single check on a layout certifies nothing yet."""
    selection = ["--layout=tp2", "--model=qwen3", "-k", "I4.grad-norm"]
    with register_engine(SPEC):
        result = pytester.runpytest_inprocess(
            "-p", "no:cacheprovider", "-v", "--engine=toy-tp", *selection, "--pyargs", "core_rl_conformance"
        )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*toy-tp-tp2-qwen3*PASSED*", "*tensor_parallel: uncertified (I1.*more were not selected)"]
    )
