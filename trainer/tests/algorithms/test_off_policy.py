"""Off-policy corrections against plain float64 code, one token at a time."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from algorithm_support import ragged_batch, trained_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms.off_policy import Correction, Decoupled, Masked, Truncated, importance_metrics

CORRECTIONS = [
    Decoupled(),
    Truncated(limit=1.1),
    Masked(low=0.9, high=1.2),
    Truncated(type="sequence_truncated", limit=1.1),
    Masked(type="sequence_masked", low=0.7, high=1.2),
]


def plain_weights(correction: Correction, batch: SequenceBatch) -> tuple[list[float], list[float]]:
    """Ratios and limited weights of the trained tokens, in order."""
    proximal, behaviour = batch["prox_logprobs"].tolist(), batch["logprobs"].tolist()
    ratios: list[float] = []
    for row in trained_rows(batch):
        token_ratios = [math.exp(proximal[t] - behaviour[t]) for t in row]
        by_sequence = correction.type.startswith("sequence")
        ratios += [math.prod(token_ratios)] * len(token_ratios) if by_sequence else token_ratios
    match correction:
        case Truncated():
            return ratios, [min(ratio, correction.limit) for ratio in ratios]
        case Masked():
            return ratios, [r if correction.low <= r <= correction.high else 0.0 for r in ratios]
    return ratios, ratios


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), seed=st.integers(0, 99))
def test_weights_and_metrics_are_the_papers(correction: Correction, lengths: list[int], seed: int) -> None:
    batch = ragged_batch(lengths, seed)
    mask = batch.loss_mask
    spoiled = {n: batch[n].masked_fill(~mask, math.nan) for n in ("prox_logprobs", "logprobs")}
    batch = batch.with_tokens(**spoiled)
    ratios, weights = plain_weights(correction, batch)
    actual = correction.limited(correction.ratios(batch))
    assert actual[mask].tolist() == pytest.approx(weights, rel=1e-12)
    assert bool(torch.isfinite(actual).all())
    metrics = importance_metrics(correction, batch, Comm())
    if not ratios:
        assert metrics == {}
        return
    squares = sum(w * w for w in weights)
    expected = {
        "importance_mean": statistics.fmean(ratios),
        "importance_max": max(ratios),
        "importance_min": min(ratios),
        "importance_limited": statistics.fmean(w != r for w, r in zip(weights, ratios, strict=True)),
        "importance_ess": sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-9)


def test_equal_policies_have_unit_weights() -> None:
    batch = ragged_batch([5, 2, 9])
    batch = batch.with_tokens(prox_logprobs=batch["logprobs"])
    for correction in CORRECTIONS:
        assert bool((correction.limited(correction.ratios(batch)) == 1).all())
        metrics = importance_metrics(correction, batch, Comm())
        assert (metrics["importance_ess"], metrics["importance_limited"]) == (1.0, 0.0)


def test_distant_policy_gives_finite_weights() -> None:
    batch = ragged_batch([50])
    batch = batch.with_tokens(prox_logprobs=batch["logprobs"] + 300.0)
    for correction in CORRECTIONS:
        assert bool(torch.isfinite(correction.limited(correction.ratios(batch))).all())
