"""Checks of whole trainers: a plain trainer passes them all, and each mutant of it dies by the check meant for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from trainers.mutants import MUTANTS
from trainers.plain import PlainTrainer

from core_rl.config.layout import ParallelLayout
from core_rl.errors import GroupError, RankDied, RankFailed
from core_rl_conformance.case import Case
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.profile import Profile, Setting
from core_rl_conformance.session.session import load_trainer
from core_rl_conformance.trainers.spec import Feature, TrainerSpec
from core_rl_trainer.algorithms.kl import MAX_LOG_RATIO
from core_rl_trainer.conformance import SPEC as TRAINER

DP2 = ParallelLayout(dp=2)
# As core-rl-trainer, and so with every check, but without its clamp.
SPEC = replace(
    TRAINER,
    name="plain",
    factory="trainers.plain:PlainTrainer",
    log_ratio_clamp=math.inf,
    profile=Profile(layouts=(ParallelLayout(), DP2), families=("qwen3", "llama")),
)
IN_PROCESSES = replace(
    SPEC, factory="trainers.processes:GlooTrainer", processes="each rank", advantages=frozenset()
)
BY_SGD = replace(SPEC, features=SPEC.features - {Feature.GRADIENTS} | {Feature.SGD})
CLAMPED = replace(SPEC, factory="trainers.mutants:ClampsLogRatios", log_ratio_clamp=5.0)
CHECKS = [name for name, check in load_checks().items() if check.kind == "trainer"]


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values")) as made:
        yield made


def _run(values: ExpectedValues, identifier: str, spec: TrainerSpec, directory: Path) -> None:
    values.trainers.discard(spec.name)
    target = replace(load_trainer(f"{__name__}:SPEC", load_checks()), trainer=spec)
    case = Case(
        check=load_checks()[identifier],
        target=target,
        setting=Setting(layout=DP2),
        family="qwen3",
        dtype="float32",
        seed=0,
        device="cpu",
    )
    case.check.function(EngineUnderTest(case, values, directory))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("identifier", "spec"),
    [
        *((name, SPEC) for name in CHECKS),
        ("T1.reinforce", BY_SGD),
        ("T4.untrained", BY_SGD),
        ("T1.clipped", CLAMPED),
    ],
)
def test_plain_trainer_passes(
    expected_values: ExpectedValues, identifier: str, spec: TrainerSpec, tmp_path: Path
) -> None:
    _run(expected_values, identifier, spec, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mutant", "identifier", "message"), MUTANTS)
def test_trainer_mutant_dies_by_its_check(
    expected_values: ExpectedValues, mutant: type[PlainTrainer], identifier: str, message: str, tmp_path: Path
) -> None:
    spec = replace(SPEC, factory=f"{mutant.__module__}:{mutant.__name__}")
    with pytest.raises(AssertionError, match=message):
        _run(expected_values, identifier, spec, tmp_path)


@pytest.mark.parametrize("identifier", ["T1.aggregations", "T3.metrics", "T3.order", "T7.resume"])
def test_trainer_in_processes_passes(
    expected_values: ExpectedValues, identifier: str, tmp_path: Path
) -> None:
    _run(expected_values, identifier, IN_PROCESSES, tmp_path)


@pytest.mark.parametrize(
    ("mutant", "error", "message"),
    [
        ("AnswersOnOneRank", GroupError, r"on rank 0 and \{\} on rank 1; reduce metrics"),
        ("OwnLoss", GroupError, "on rank 1; reduce metrics"),
        ("TensorsOnLastRank", GroupError, r"gradients\(\) returned nothing on rank 0, and tensors on \[1\]"),
        ("Raises", RankFailed, "rank 1 of 2 failed: ArithmeticError: no gradients here"),
        ("Ends", RankDied, "rank 1 ended with exit code 3 during gradients"),
    ],
)
def test_wrong_rank_is_named(
    expected_values: ExpectedValues, mutant: str, error: type[GroupError], message: str, tmp_path: Path
) -> None:
    spec = replace(IN_PROCESSES, factory=f"trainers.processes:{mutant}")
    with pytest.raises(error, match=message):
        _run(expected_values, "T1.aggregations", spec, tmp_path)


def test_spec_names_the_clamp_of_losses() -> None:
    assert TRAINER.log_ratio_clamp == MAX_LOG_RATIO


def test_every_check_has_a_mutant() -> None:
    assert set(CHECKS) == {identifier for _, identifier, _ in MUTANTS}
