"""Training runs from end to end: the oracle's steps, and the plain models that deviate from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import BATCHES, CONFIG, LOSS
from core_rl_conformance.trajectory import ExpectedTraining, Training, expected_training
from core_rl_oracle.oracle import OptimizerState, Oracle, Schedule
from core_rl_oracle.plain import VARIANTS, PlainModel, Variant

MODEL = TinyModel(family="gpt2")
TRAINING = Training(
    data=tuple(ragged(MODEL.vocab_size, seed, PROBE) for seed in BATCHES),
    loss=LOSS,
    config=CONFIG,
    schedule=Schedule(type="linear", total_steps=len(BATCHES) + 2),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ModelStore(tmp_path_factory.mktemp("models")).directory(MODEL)


@pytest.fixture(scope="module")
def expected(directory: Path) -> ExpectedTraining:
    return expected_training(directory, "lm", TRAINING, torch.float32, "cpu")


def test_steps_run_in_sequence(directory: Path, expected: ExpectedTraining) -> None:
    oracle = Oracle(directory)
    state = OptimizerState.start(oracle.parameters())
    for step, data in enumerate(TRAINING.data[:2]):
        result = oracle.gradients(data.for_oracle(), LOSS.of_sequence, LOSS.temperature)
        assert (result.loss, result.norm) == (expected.truth.losses[step], expected.truth.norms[step])
        CONFIG.step(state, result.grads, TRAINING.rates[step])
        oracle.set_parameters(state.params)


def test_every_step_clips_and_moves_weights(directory: Path, expected: ExpectedTraining) -> None:
    """Otherwise a tolerance could hide a step that is not made, or made without clipping."""
    largest = CONFIG.max_grad_norm
    assert largest is not None and min(expected.truth.norms) > 4 * largest
    start = Oracle(directory).parameters()
    for name, value in expected.truth.weights.items():
        assert float((value - start[name]).abs().max()) > 1000 * expected.weights[name].limit, name


@pytest.mark.parametrize("part", ["losses", "norms", "weights"])
def test_wrong_schedule_exceeds_every_tolerance(
    directory: Path, expected: ExpectedTraining, part: str
) -> None:
    second = expected_training(
        directory,
        "lm",
        replace(TRAINING, schedule=Schedule(type="linear", total_steps=20)),
        torch.float32,
        "cpu",
    ).truth
    if part == "weights":
        for name, value in expected.truth.weights.items():
            assert not expected.weights[name].allows(float((value - second.weights[name]).abs().max()))
        return
    # The rate of the first step is the same, so losses and norms differ from step 2 on.
    for step in (2, 3):
        difference = abs(getattr(expected.truth, part)[step] - getattr(second, part)[step])
        assert not getattr(expected, part)[step].allows(difference)


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[1]], ids=["eager", "sdpa"])
def test_plain_models_use_given_weights(directory: Path, variant: Variant) -> None:
    sequences = TRAINING.data[0].for_oracle()
    plain, oracle = PlainModel(directory, "lm", torch.float32), Oracle(directory)
    moved = {name: 1.1 * value for name, value in oracle.parameters().items()}
    before = plain.outputs(variant, sequences, 1.0)
    plain.set_weights(moved)
    oracle.set_parameters(moved)
    after, truth = plain.outputs(variant, sequences, 1.0), oracle.evaluate(sequences)
    for new, right in zip(after, truth, strict=True):
        torch.testing.assert_close(new["entropy"].double(), right["entropy"], rtol=1e-4, atol=1e-4)
    assert any(
        not torch.equal(old["entropy"], new["entropy"]) for old, new in zip(before, after, strict=True)
    )
