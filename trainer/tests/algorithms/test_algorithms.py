"""The formulas of the algorithms against plain float64 implementations, one sequence and token at a time."""

from __future__ import annotations

import math
import pickle
import statistics
from typing import Any

import pytest
import torch
from algorithm_losses import plain_cispo_gradient, plain_mean, plain_policy_loss, policy_output
from algorithm_support import VOCABULARY, BigramEngine, drop_tokens, ragged_batch, trained_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.errors import LossError
from core_rl_trainer.algorithms.aggregation import Aggregation, FixedLength, aggregate, weight_fn
from core_rl_trainer.algorithms.kl import KLEstimator, kl_estimate
from core_rl_trainer.algorithms.objectives import (
    CISPO,
    GSPO,
    Clipped,
    CustomObjective,
    DualClipped,
    PolicyLoss,
    Reinforce,
    SequenceClipped,
)
from core_rl_trainer.algorithms.sft import SFTConfig

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", FixedLength(fixed_length=7))
ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
LENGTHS = [5, 2, 9, 3, 1, 7]
ONE = MicroBatchSpec(count=1)

lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=7)


# ------------------------------------------------------------------ aggregation


@settings(max_examples=50)
@given(lengths=lengths_strategy, prompt=st.integers(0, 4), seed=st.integers(0, 99))
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_aggregation_is_the_mean_of_its_name(
    how: Aggregation, lengths: list[int], prompt: int, seed: int
) -> None:
    batch = ragged_batch(lengths, seed, prompt)
    weight = weight_fn(how)(batch)
    total = float(aggregate(batch["advantages"], batch, how))
    if not any(trained_rows(batch)):
        assert (total, weight) == (0.0, 0.0)
    else:
        assert total / weight == pytest.approx(
            plain_mean(batch["advantages"].tolist(), batch, how), rel=1e-12, abs=1e-12
        )


# --------------------------------------------------------------------------- KL


def two_policies() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_(True)
    return logits, torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_expect_the_divergence(estimator: KLEstimator) -> None:
    """k1 and k3 exactly; k2 is biased, by little when the policies are close."""
    logits, log_p = two_policies()
    if estimator == "k2":
        log_p = (logits.detach() + 0.05 * log_p).log_softmax(-1)
    log_q = logits.detach().log_softmax(-1)
    exact = float((log_q.exp() * (log_q - log_p)).sum())
    expected = float((log_q.exp() * kl_estimate(log_q, log_p, estimator)).sum())
    assert expected == pytest.approx(exact, rel=0.05 if estimator == "k2" else 1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimators_have_documented_gradients(estimator: KLEstimator) -> None:
    """The expectation over tokens of the gradient, not the gradient of the expectation."""
    logits, log_p = two_policies()
    log_q = logits.log_softmax(-1)
    weights = log_q.detach().exp()
    (gradient,) = torch.autograd.grad(
        (weights * kl_estimate(log_q, log_p, estimator)).sum(), logits, retain_graph=True
    )
    target = {
        "k1": 0 * log_q.sum(),
        "k2": (log_q.exp() * (log_q - log_p)).sum(),
        "k3": (log_p.exp() * (log_p - log_q)).sum(),
    }[estimator]
    (expected,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_only_k3_is_clamped_for_distant_policies() -> None:
    """The ratio would overflow; k1 and k2 are the formula, and pull back however far a token has drifted."""
    policy = torch.tensor([-90.0, -0.1, -30.0], requires_grad=True)
    reference = torch.tensor([-1.0, -60.0, -29.0])
    k1, k2, k3 = (kl_estimate(policy, reference, name) for name in ESTIMATORS)
    assert k1.tolist() == pytest.approx([-89.0, 59.9, -1.0])
    assert k2.tolist() == pytest.approx([89.0**2 / 2, 59.9**2 / 2, 0.5])
    (gradient,) = torch.autograd.grad(k2.sum(), policy)
    assert gradient.tolist() == pytest.approx([-89.0, 59.9, -1.0])
    assert bool(torch.isfinite(k3).all())


def test_k3_is_never_negative_and_accurate_near_zero() -> None:
    difference = torch.tensor([1e-6, -1e-6, 0.0, 3.0, -3.0], dtype=torch.float64)
    estimates = kl_estimate(torch.zeros_like(difference), difference, "k3")
    assert bool((estimates >= 0).all())
    assert float(estimates[0]) == pytest.approx(5e-13, rel=1e-3)


# ---------------------------------------------------------------- policy loss


LOSSES = [
    PolicyLoss(),
    PolicyLoss(objective=Clipped(aggregation="sequence_mean", clip_low=0.1, clip_high=0.3)),
    PolicyLoss(objective=Clipped(aggregation=FixedLength(fixed_length=6))),
    PolicyLoss(kl_coef=0.3, kl_estimator="k1"),
    PolicyLoss(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2),
    PolicyLoss(objective=Clipped(aggregation="sequence_mean"), kl_coef=0.3, entropy_coef=0.2),
    PolicyLoss(objective=DualClipped(limit=1.3)),
    PolicyLoss(objective=GSPO(clip_low=0.05, clip_high=0.1), kl_coef=0.1),
    PolicyLoss(objective=SequenceClipped(clip_high=0.5)),
    PolicyLoss(objective=Reinforce()),
]
CISPO_LOSS = PolicyLoss(objective=CISPO(clip_low=0.2, clip_high=0.1))
ALL_LOSSES = [*LOSSES, CISPO_LOSS]


def ids(loss: Any) -> str:
    return (
        f"{type(loss.objective).__name__}-{loss.objective.aggregation}-{loss.kl_coef}"
        if isinstance(loss, PolicyLoss)
        else "sft"
    )


def weighted_batch(lengths: list[int], seed: int = 0) -> SequenceBatch:
    """With off-policy weights."""
    batch = ragged_batch(lengths, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * 2
    return batch.with_tokens(importance_weights=weights)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    weighted=st.booleans(),
)
def test_policy_loss_is_the_papers_formula(
    loss: PolicyLoss, lengths: list[int], seed: int, weighted: bool
) -> None:
    batch = weighted_batch(lengths, seed) if weighted else ragged_batch(lengths, seed)
    output = policy_output(batch, seed)
    total, _ = loss(output, batch)
    expected = plain_policy_loss(output["logprobs"].detach(), output["entropy"].detach(), batch, loss)
    actual = float(total.detach()) / loss.spec(1.0).weight(batch)
    assert actual == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
def test_policy_loss_has_the_formulas_gradient(loss: PolicyLoss) -> None:
    """Central differences of the plain formula, one token at a time."""
    batch = weighted_batch(LENGTHS)
    output = policy_output(batch)
    total, _ = loss(output, batch)
    (gradient,) = torch.autograd.grad(total / loss.spec(1.0).weight(batch), output["logprobs"])
    assert bool((gradient != 0).any())
    step = 1e-6
    for t in range(batch.num_tokens):
        sides = []
        for sign in (1, -1):
            moved = output["logprobs"].detach().clone()
            moved[t] += sign * step
            sides.append(plain_policy_loss(moved, output["entropy"].detach(), batch, loss))
        assert float(gradient[t]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


def test_cispo_clips_weights_and_keeps_gradients() -> None:
    batch = ragged_batch(LENGTHS)
    output = policy_output(batch)
    total, metrics = CISPO_LOSS(output, batch)
    (gradient,) = torch.autograd.grad(total, output["logprobs"])
    new, old, advantages = (
        values.tolist()
        for values in (output["logprobs"].detach(), batch["prox_logprobs"], batch["advantages"])
    )
    assert isinstance(CISPO_LOSS.objective, CISPO)
    for row in trained_rows(batch):
        for t in row:
            expected = -plain_cispo_gradient(CISPO_LOSS.objective, new, old, advantages, t)
            assert float(gradient[t]) == pytest.approx(expected, rel=1e-12)
    assert 0 < metrics["clip_fraction"].result() < 1


def test_gspo_averages_log_ratios_before_clamping() -> None:
    """One token is 45 nats less likely than it was and another 44 more, in an answer of ten."""
    batch = drop_tokens(ragged_batch([11]), "prox_logprobs", "advantages")
    change = torch.zeros(11, dtype=torch.float64)
    change[3], change[7] = -45.0, 44.0
    loss = PolicyLoss(objective=GSPO(clip_low=0.2, clip_high=0.2))
    output = ModelOutput(logprobs=batch["logprobs"] + change, entropy=change)
    total, _ = loss(output, batch.with_tokens(advantages=torch.ones(11, dtype=torch.float64)))
    assert float(total) == pytest.approx(-math.exp(-0.1), rel=1e-12)


def squared(logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Tensor:
    """A third party's objective."""
    return advantages * logprobs - (logprobs - old).square()


class Scaled:
    """A third party's objective with a setting."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Tensor:
        return self.factor * advantages * logprobs


def short(logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Tensor:
    return logprobs[:1]


def test_a_custom_objective_is_used_and_travels() -> None:
    batch = ragged_batch(LENGTHS)
    output = policy_output(batch)
    loss = PolicyLoss(objective=CustomObjective(type=f"{__name__}:squared"))
    total, _ = pickle.loads(pickle.dumps(loss))(output, batch)
    mask = batch.loss_mask
    expected = squared(output["logprobs"], batch["prox_logprobs"], batch["advantages"], batch)[mask].sum()
    assert float(total.detach()) == pytest.approx(-float(expected.detach()), rel=1e-12)
    scaled = CustomObjective(type=f"{__name__}:Scaled", settings={"factor": 2.0})
    twice, _ = PolicyLoss(objective=scaled)(output, batch)
    plain, _ = PolicyLoss(objective=Reinforce())(output, batch)
    assert float(twice.detach()) == pytest.approx(2 * float(plain.detach()))
    with pytest.raises(LossError, match="must return a Surrogate or a tensor"):
        PolicyLoss(objective=CustomObjective(type=f"{__name__}:short"))(output, batch)


def test_policy_metrics_are_plain_statistics_over_trained_tokens() -> None:
    batch = ragged_batch(LENGTHS)
    output = policy_output(batch)
    loss = PolicyLoss(kl_coef=0.1, log_entropy=True)
    _, metrics = loss(output, batch)
    trained = [t for row in trained_rows(batch) for t in row]
    new, old, ref, advantage, entropy = (
        [float(values[t].detach()) for t in trained]
        for values in (
            output["logprobs"],
            batch["prox_logprobs"],
            batch["ref_logprobs"],
            batch["advantages"],
            output["entropy"],
        )
    )
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    outside = [
        (ratio > 1.2 and gain > 0) or (ratio < 0.8 and gain < 0)
        for ratio, gain in zip(ratios, advantage, strict=True)
    ]
    log_r = [b - a for a, b in zip(new, ref, strict=True)]
    expected = {
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "clip_fraction": statistics.fmean(outside),
        "approx_kl": statistics.fmean(ratio - 1 - math.log(ratio) for ratio in ratios),
        "entropy": statistics.fmean(entropy),
        "entropy_estimate": -statistics.fmean(new),
        "advantage": statistics.fmean(advantage),
        "kl_k1": statistics.fmean(-x for x in log_r),
        "kl_k2": statistics.fmean(x * x / 2 for x in log_r),
        "kl_k3": statistics.fmean(math.exp(x) - 1 - x for x in log_r),
        "policy_loss": statistics.fmean(
            -min(ratio * gain, max(min(ratio, 1.2), 0.8) * gain)
            for ratio, gain in zip(ratios, advantage, strict=True)
        ),
    }
    assert any(outside)
    assert {name: metric.result() for name, metric in metrics.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "needed"),
    [(PolicyLoss(), False), (PolicyLoss(log_entropy=True), True), (PolicyLoss(entropy_coef=0.1), True)],
)
def test_entropy_is_computed_only_on_request(loss: PolicyLoss, needed: bool) -> None:
    assert loss.spec(1.0).outputs == (("logprobs", "entropy") if needed else ("logprobs",))
    _, metrics = loss(policy_output(ragged_batch(LENGTHS)), ragged_batch(LENGTHS))
    assert ("entropy" in metrics) is needed


@pytest.mark.parametrize("loss", [*ALL_LOSSES, SFTConfig(), SFTConfig(aggregation="sequence_mean")], ids=ids)
def test_values_at_masked_positions_are_ignored(loss: Any) -> None:
    batch = ragged_batch(LENGTHS)
    hidden = ~batch.loss_mask
    for fill in (0.0, float("nan"), float("inf"), 1e30):
        spoiled = batch.with_tokens(
            **{n: v.masked_fill(hidden, fill) for n, v in batch.tokens.items() if n != "loss_mask"}
        )
        outputs = policy_output(batch)
        filled = ModelOutput(**{n: v.masked_fill(hidden, fill) for n, v in outputs.items()})
        total, metrics = loss(filled, spoiled)
        (gradient,) = torch.autograd.grad(total, outputs["logprobs"])
        clean, clean_metrics = loss(policy_output(batch), batch)
        assert float(total.detach()) == float(clean.detach())
        assert {n: m.result() for n, m in metrics.items()} == {
            n: m.result() for n, m in clean_metrics.items()
        }
        assert bool(torch.isfinite(gradient).all())
        assert bool((gradient[hidden] == 0).all())


def test_a_huge_ratio_gives_a_finite_gradient() -> None:
    batch = drop_tokens(ragged_batch([3]), "prox_logprobs", "ref_logprobs").with_tokens(
        advantages=torch.ones(3), logprobs=torch.full((3,), -200.0)
    )
    logprobs = torch.zeros(3, requires_grad=True)
    total, _ = PolicyLoss()(ModelOutput(logprobs=logprobs, entropy=torch.zeros(3)), batch)
    total.backward()
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())


def test_ratio_falls_back_to_behaviour_policy() -> None:
    batch = drop_tokens(ragged_batch(LENGTHS), "prox_logprobs")
    output = policy_output(batch)
    total, _ = PolicyLoss()(output, batch)
    same, _ = PolicyLoss()(output, batch.with_tokens(prox_logprobs=batch["logprobs"]))
    assert float(total.detach()) == float(same.detach())


# ------------------------------------------------------------------------ SFT


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sft_loss_is_the_mean_negative_log_likelihood(how: Aggregation) -> None:
    batch = ragged_batch(LENGTHS)
    output = policy_output(batch)
    total, metrics = SFTConfig(aggregation=how)(output, batch)
    losses = [-value for value in output["logprobs"].tolist()]
    weight = SFTConfig(aggregation=how).spec().weight(batch)
    assert float(total.detach()) / weight == pytest.approx(plain_mean(losses, batch, how), rel=1e-12)
    assert metrics["nll"].result() == pytest.approx(plain_mean(losses, batch, "token_mean"), rel=1e-12)


# ------------------------------------------------------------ cuts of the batch


@pytest.mark.parametrize("loss", [*ALL_LOSSES, SFTConfig(), SFTConfig(aggregation="sequence_mean")], ids=ids)
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(2, 9), min_size=2, max_size=7), count=st.integers(2, 5))
def test_micro_batches_leave_gradients_and_metrics_equal(loss: Any, lengths: list[int], count: int) -> None:
    spec = loss.spec() if isinstance(loss, SFTConfig) else loss.spec(0.7)
    engine = BigramEngine()
    with torch.no_grad():
        engine.weights += torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    batch = ragged_batch([9, *lengths])
    near = engine.run(batch, 0.7).detached()["logprobs"] + 0.2 * batch["logprobs"]
    batch = batch.with_tokens(
        prox_logprobs=near
    )  # else every ratio may be clipped, with no gradient to compare
    uncut = engine.gradient(batch, spec, ONE)
    expected = engine.weights.grad
    assert expected is not None
    assert expected.abs().max() > 0
    cut = engine.gradient(batch, spec, MicroBatchSpec(count=count))
    assert engine.weights.grad is not None
    torch.testing.assert_close(engine.weights.grad, expected, rtol=1e-10, atol=1e-12)
    assert cut == pytest.approx(uncut, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", [*ALL_LOSSES, SFTConfig()], ids=ids)
def test_losses_can_be_pickled(loss: Any) -> None:
    spec = loss.spec() if isinstance(loss, SFTConfig) else loss.spec(0.7)
    assert pickle.loads(pickle.dumps(spec)) == spec
