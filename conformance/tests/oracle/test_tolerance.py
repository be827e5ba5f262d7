"""The tolerance rule, the baseline it rests on, and the models that it is measured on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.hints.diagnose import compare_mean_square
from core_rl_conformance.inputs.data import LENGTHS, Repeated, ragged
from core_rl_conformance.inputs.losses import RepeatedLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.profile import FAMILIES
from core_rl_oracle.plain import VARIANTS, PlainModel, Variant
from core_rl_oracle.tolerance import (
    FACTOR,
    FLOOR_ULPS,
    Tolerance,
    largest_difference,
    mean_square,
    signed_mean,
    tolerance,
    tolerances,
)

EPS = torch.finfo(torch.float32).eps


def test_limit_is_four_baselines_and_a_floor() -> None:
    expected = torch.tensor([1.0, -8.0])
    variants = [expected + 1e-6, expected - 3e-6]
    allowed = tolerance(variants, expected, torch.float32)
    assert allowed.floor == FLOOR_ULPS * EPS * 8.0
    assert allowed.baseline == pytest.approx(3e-6, rel=0.2)
    assert allowed.limit == FACTOR * allowed.baseline + allowed.floor
    assert allowed.allows(allowed.limit) and not allowed.allows(1.01 * allowed.limit)


def test_tolerance_combines_tensor_baseline_and_floor() -> None:
    expected = {"large": torch.tensor([4.0]), "zero": torch.tensor([0.0])}
    variants = [{"large": torch.tensor([4.1]), "zero": torch.tensor([0.0])}]
    allowed = tolerances(variants, expected, torch.float32)
    assert allowed["zero"].baseline == 0.0
    assert allowed["zero"].floor == allowed["large"].floor > 0.0


@given(st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_nothing_infinite_or_not_a_number_passes(value: float) -> None:
    error = largest_difference(torch.tensor([value]), torch.tensor([0.0]))
    assert Tolerance(baseline=1e38, floor=1e38).allows(error) == math.isfinite(value)


def test_single_nan_is_detected() -> None:
    assert largest_difference(torch.tensor([0.0, math.nan, 0.0]), torch.zeros(3)) == math.inf


def _errors(offset: float, spread: float, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [offset + spread * torch.randn(length, generator=generator) for length in LENGTHS if length > 1]


def _passes(mean: tuple[float, float]) -> bool:
    return abs(mean[0]) <= mean[1]


def test_noise_around_zero_has_no_signed_mean() -> None:
    plain = [_errors(0.0, 1e-6, seed) for seed in range(6)]
    for seed in range(10, 30):
        assert _passes(signed_mean(_errors(0.0, 1e-6, seed), plain, 0.0))


def test_small_systematic_drift_is_detected() -> None:
    plain = [_errors(0.0, 1e-6, seed) for seed in range(6)]
    drift = signed_mean(_errors(3e-6, 1e-6, 9), plain, 0.0)
    assert not _passes(drift)
    assert drift[0] == pytest.approx(3e-6, rel=0.2)


def test_large_overall_errors_are_detected() -> None:
    plain = [_errors(0.0, 1e-6, seed) for seed in range(6)]
    fine, noisy = (mean_square(_errors(0.0, sigma, 9), plain, 0.0) for sigma in (2e-6, 6e-6))
    assert noisy[0] == pytest.approx(6e-6, rel=0.2)
    assert compare_mean_square("x", *fine).problem is None
    assert "no single value is far off" in str(compare_mean_square("x", *noisy).problem)


def test_tolerance_ignores_the_engines_luck() -> None:
    plain = [_errors(0.0, 1e-6, seed) for seed in range(6)]
    assert _passes(signed_mean(_errors(2e-7, 0.0, 9), plain, 0.0))


# ------------------------------------------------------------ the plain model


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("models"))


def test_there_are_at_least_five_different_variants() -> None:
    assert len(set(VARIANTS)) >= 5
    assert {variant.padding for variant in VARIANTS} == {"left", "right"}
    assert sum(variant.nudge is not None for variant in VARIANTS) >= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_variants_agree_and_differ(tmp_path: Path, family: str) -> None:
    """All variants are right (their errors are rounding), and they do not all round alike."""
    model, data = TinyModel(family=family), ragged(TinyModel(family=family).vocab_size, 0)
    with ExpectedValues(tmp_path) as expected_values:
        expected = expected_values.outputs(model, data, "logprobs", 1.0, torch.float32)
        gradients = expected_values.gradients(model, data, TokenMeanLoss(), torch.float32)
    joined = [torch.cat(variant) for variant in expected.variants]
    errors = [largest_difference(value, torch.cat(expected.values)) for value in joined]
    assert max(errors) < 1e-4
    assert len(set(errors)) >= 3
    assert all(t.baseline < 1e-4 for t in gradients.tolerances.values())
    assert _passes(expected.signed_mean(expected.variants[0]))


def test_baseline_covers_rounding_of_long_sums(tmp_path: Path) -> None:
    """With this seed a correct engine was over the limit that the different sequences alone give."""
    model = TinyModel(family="gpt2", seed=48698)
    data = Repeated.of(ragged(model.vocab_size, 0), [number % len(LENGTHS) for number in range(300)])
    with ExpectedValues(tmp_path) as expected_values:
        few = expected_values.gradients(model, data.distinct, RepeatedLoss(), torch.float32).tolerances
        many = expected_values.gradients_of_many(model, data, torch.float32).tolerances
    growth = [many[name].baseline / few[name].baseline for name in few]
    assert min(growth) >= 1 and max(growth) > 2
    assert all(tolerance.baseline < 1e-4 for tolerance in many.values())


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_equal_sequences_are_computed_once(store: ModelStore, family: str) -> None:
    model = TinyModel(family=family)
    data = Repeated.of(ragged(model.vocab_size, 0), [number % 5 for number in range(23)])
    plain, loss = PlainModel(store.directory(model), "lm", torch.float32), TokenMeanLoss().of_sequence
    value, grads = plain.gradients(Variant(rows_at_once=1), data.all.for_oracle(), loss, 1.0)
    again, sums = plain.repeated_gradients(data.distinct.for_oracle(), data.order, loss, 1.0)
    assert value == again
    assert grads.keys() == sums.keys()
    assert all(torch.equal(grads[name], sums[name]) for name in grads)


def test_outputs_come_back_in_the_callers_order(store: ModelStore) -> None:
    model = TinyModel(family="gpt2")
    plain = PlainModel(store.directory(model), "lm", torch.float32)
    sequences = ragged(model.vocab_size, 0).for_oracle()
    for variant in VARIANTS:
        lengths = [len(outputs["logprobs"]) for outputs in plain.outputs(variant, sequences, 1.0)]
        assert lengths == list(LENGTHS)


# ---------------------------------------------------------------- tiny models


@pytest.mark.parametrize("family", FAMILIES)
def test_models_expose_bugs(tmp_path: Path, family: str) -> None:
    """Peaked logits, prime vocabularies, norms that are not 1, biases that are not 0."""
    model = TinyModel(family=family, seed=3)
    with ExpectedValues(tmp_path) as expected_values:
        data = ragged(model.vocab_size, 0)
        entropy = expected_values.outputs(model, data, "entropy", 1.0, torch.float32).values
        parameters = expected_values.oracle(model).parameters()
    assert float(torch.cat(entropy).mean()) < 0.6 * math.log(model.vocab_size)
    assert all(model.vocab_size % number for number in range(2, model.vocab_size))
    vectors = {name: value for name, value in parameters.items() if value.dim() == 1}
    assert all(float(value.std()) > 0.01 for value in vectors.values())
    assert all(value.abs().max() > 0 for value in parameters.values())


def test_equal_fields_build_equal_models(tmp_path: Path) -> None:
    stores = [ModelStore(tmp_path / name) for name in ("a", "b")]
    model = TinyModel(family="llama", seed=1)
    files = [(store.directory(model) / "model.safetensors").read_bytes() for store in stores]
    assert files[0] == files[1]
    assert (
        files[0]
        != (stores[0].directory(TinyModel(family="llama", seed=2)) / "model.safetensors").read_bytes()
    )
    with ExpectedValues(tmp_path / "expected_values") as expected_values:
        lm = expected_values.oracle(model).parameters()
        value = expected_values.oracle(TinyModel(family="llama", seed=1, head="value")).parameters()
    shared = set(lm) & set(value)
    assert len(shared) == len(lm) - 1
    assert all(torch.equal(lm[name], value[name]) for name in shared)


def test_data_covers_edge_cases() -> None:
    data = ragged(151, 0)
    assert min(data.lengths) == 1 and len(set(data.lengths)) > 8
    trained = [any(row.mask[1:]) for row in data.rows]
    assert any(trained) and not all(trained)
    assert any(True in row.mask[2:] and not any(row.mask[:2]) for row in data.rows)
    batch = data.batch()
    masks = torch.cat([sequence.fields["mask"] for sequence in data.for_oracle()])
    assert torch.equal(batch.loss_mask, masks)
