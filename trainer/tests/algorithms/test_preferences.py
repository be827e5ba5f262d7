"""Losses on preference pairs against plain float64 code, one pair at a time, and invalid pairs."""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algorithm_support import BigramEngine, ragged_batch, trained_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.errors import BatchError
from core_rl_trainer.algorithms import DPOConfig, DPOInterface, RewardModelConfig, RewardModelInterface
from core_rl_trainer.algorithms.preferences import check_pairs, count_pairs

ONE = MicroBatchSpec(count=1)
LOSSES = [
    DPOConfig(),
    DPOConfig(beta=0.7, label_smoothing=0.1),
    DPOConfig(variant="ipo", beta=0.4),
    DPOConfig(variant="hinge", beta=0.6),
]

pairs_strategy = st.lists(st.integers(2, 9), min_size=1, max_size=5).map(lambda half: [*half, *half[::-1]])


def pair_batch(lengths: list[int], seed: int = 0) -> SequenceBatch:
    """Sequence ``b`` and the one ``n`` further are a pair; which of them is chosen changes."""
    count = len(lengths) // 2
    marks = torch.tensor([b % 2 for b in range(count)] + [1 - b % 2 for b in range(count)]).bool()
    batch = ragged_batch(lengths, seed).with_sequences(chosen=marks)
    return replace(batch, unit=torch.arange(count).repeat(2) * 10)


def pairs_of(batch: SequenceBatch) -> list[tuple[int, int]]:
    """Chosen and rejected sequence of each pair."""
    count = batch.num_sequences // 2
    marks = batch["chosen"].tolist()
    return [(b, b + count) if marks[b] else (b + count, b) for b in range(count)]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def plain_dpo(logprobs: list[float], batch: SequenceBatch, loss: DPOConfig) -> list[float]:
    reference, rows = batch["ref_logprobs"].tolist(), trained_rows(batch)
    losses = []
    for chosen, rejected in pairs_of(batch):
        ratios = [[logprobs[t] - reference[t] for t in rows[b]] for b in (chosen, rejected)]
        gain = sum(ratios[0]) - sum(ratios[1])
        match loss.variant:
            case "dpo":
                smooth = loss.label_smoothing
                value = -(1 - smooth) * log_sigmoid(loss.beta * gain) - smooth * log_sigmoid(
                    -loss.beta * gain
                )
            case "ipo":
                means = statistics.fmean(ratios[0]) - statistics.fmean(ratios[1])
                value = (means - 1 / (2 * loss.beta)) ** 2
            case "hinge":
                value = max(0.0, 1 - loss.beta * gain)
        losses.append(value)
    return losses


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.variant}-{loss.label_smoothing}")
@settings(max_examples=40)
@given(lengths=pairs_strategy, seed=st.integers(0, 99))
def test_dpo_losses_are_the_papers(loss: DPOConfig, lengths: list[int], seed: int) -> None:
    batch = pair_batch(lengths, seed)
    logprobs = batch["prox_logprobs"]
    total, metrics = loss(ModelOutput(logprobs=logprobs), batch)
    expected = statistics.fmean(plain_dpo(logprobs.tolist(), batch, loss))
    assert float(total) / loss.spec().weight(batch) == pytest.approx(expected, rel=1e-11)
    assert metrics["preference_loss"].result() == pytest.approx(expected, rel=1e-11)


def test_ties_count_as_half_in_reward_accuracy() -> None:
    batch = pair_batch([2, 3], 0)
    _, metrics = RewardModelConfig()(ModelOutput(scores=torch.ones(2, dtype=torch.float64)), batch)
    assert metrics["accuracy"].result() == 0.5


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margin", [False, True])
@settings(max_examples=25)
@given(lengths=pairs_strategy, seed=st.integers(0, 99))
def test_the_reward_loss_is_bradley_terry(center: float, margin: bool, lengths: list[int], seed: int) -> None:
    batch = pair_batch(lengths, seed)
    scores = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    margins = torch.rand(len(lengths) // 2, dtype=torch.float64).repeat(2)
    if margin:
        batch = batch.with_sequences(margin=margins)
    loss = RewardModelConfig(center_coef=center)
    total, metrics = loss(ModelOutput(scores=scores), batch)
    values, right = [], []
    for chosen, rejected in pairs_of(batch):
        gap = float(scores[chosen] - scores[rejected])
        right.append(gap > 0)
        bradley_terry = -log_sigmoid(gap - (float(margins[chosen]) if margin else 0.0))
        values.append(bradley_terry + center * float(scores[chosen] + scores[rejected]) ** 2)
    assert float(total) / loss.spec().weight(batch) == pytest.approx(statistics.fmean(values), rel=1e-11)
    assert metrics["accuracy"].result() == statistics.fmean(right)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.variant}-{loss.label_smoothing}")
@settings(max_examples=15)
@given(lengths=pairs_strategy, budget=st.integers(18, 60))
def test_micro_batches_keep_pairs_and_gradients(loss: DPOConfig, lengths: list[int], budget: int) -> None:
    batch, engine = pair_batch(lengths), BigramEngine()
    uncut = engine.gradient(batch, loss.spec(), ONE)
    expected = engine.weights.grad
    cut = engine.gradient(batch, loss.spec(), MicroBatchSpec(max_tokens=budget))
    assert expected is not None
    assert engine.weights.grad is not None
    torch.testing.assert_close(engine.weights.grad, expected, rtol=1e-10, atol=1e-12)
    assert cut == pytest.approx(uncut, rel=1e-9, abs=1e-12)


def test_masked_positions_do_not_matter() -> None:
    batch = pair_batch([5, 3, 4, 2])
    hidden = ~batch.loss_mask
    logprobs = batch["prox_logprobs"]
    for loss in LOSSES:
        clean, _ = loss(ModelOutput(logprobs=logprobs), batch)
        spoiled = batch.with_tokens(ref_logprobs=batch["ref_logprobs"].masked_fill(hidden, math.nan))
        actual, _ = loss(ModelOutput(logprobs=logprobs.masked_fill(hidden, math.nan)), spoiled)
        assert float(actual) == float(clean)


def test_losses_can_be_pickled() -> None:
    for spec in (DPOConfig().spec(), RewardModelConfig().spec()):
        assert pickle.loads(pickle.dumps(spec)) == spec


def test_dpo_steps_widen_the_gap() -> None:
    batch, engine = pair_batch([5, 3, 4, 2]), BigramEngine(lr=0.2)
    dpo = DPOInterface(DPOConfig(beta=0.5))
    assert dpo.wanted_fields == {"ref_logprobs"}
    batch = batch.with_tokens(ref_logprobs=dpo.inference(engine, batch, ONE)["logprobs"])
    steps = [dpo.train_step(engine, batch, ONE) for _ in range(4)]
    assert steps[0]["preference_loss"] == pytest.approx(math.log(2))
    gaps = [step["reward_gap"] for step in steps]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.1


def unit_of(*numbers: int) -> Callable[[SequenceBatch], SequenceBatch]:
    return lambda batch: replace(batch, unit=torch.tensor(numbers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unit_of(0, 0, 0, 1), r"(?s)sequences \[0, 1, 2\] has 3 sequences.*sequences \[3\] has 1"),
        (lambda batch: batch.with_sequences(chosen=torch.tensor([1, 1, 1, 0])), r"\[0, 2\] are both"),
        (lambda batch: batch.with_sequences(chosen=torch.tensor([0, 1, 0, 0])), r"\[0, 2\] are neither"),
        (lambda batch: ragged_batch([3, 3]), r"need \['unit', 'chosen'\]"),
    ],
)
def test_invalid_pairs_are_named(change: Callable[[SequenceBatch], SequenceBatch], message: str) -> None:
    batch = change(pair_batch([5, 3, 4, 2]))
    with pytest.raises(BatchError, match=message):
        check_pairs(batch)
    with pytest.raises(BatchError):
        RewardModelInterface(RewardModelConfig()).train_step(BigramEngine(), batch, ONE)


def test_pairs_are_counted_and_references_are_required() -> None:
    batch = pair_batch([5, 3, 4, 2])
    assert count_pairs(batch) == 2
    without = {name: value for name, value in batch.tokens.items() if name != "ref_logprobs"}
    with pytest.raises(BatchError, match=r"DPO needs the fields \['ref_logprobs'\]"):
        DPOInterface(DPOConfig()).train_step(BigramEngine(), replace(batch, tokens=without), ONE)
