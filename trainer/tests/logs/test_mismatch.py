"""Mismatch and staleness of a batch, against plain formulas token by token."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.run.online import NAMES, compared_part, mismatch_by_lag, mismatch_of, staleness_of

TOKEN = st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.booleans(), st.integers(0, 3))
"""Log-prob of the rollout, of the trainer, trained or not, version."""
RAGGED = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=5)
Tokens = list[tuple[float, float, bool, int]]


def make(rows: list[Tokens]) -> tuple[torch.Tensor, SequenceBatch]:
    """The trainer's log-probs, and the batch; untrained tokens hold NaN."""
    spoilt = [[(q, p, bool(k and m), v) for k, (q, p, m, v) in enumerate(row)] for row in rows]
    batch = SequenceBatch.from_sequences(
        [list(range(len(row))) for row in rows],
        tokens={
            "loss_mask": [[m for _, _, m, _ in row] for row in spoilt],
            "logprobs": [[q if m else math.nan for q, _, m, _ in row] for row in spoilt],
            "versions": [[v if m else -1 for _, _, m, v in row] for row in spoilt],
        },
    )
    return torch.tensor([p if m else math.nan for row in spoilt for _, p, m, _ in row]), batch


def plainly(rows: list[Tokens]) -> dict[str, float]:
    """The definitions, in Python's floats."""
    rows = [[token for token in row[1:] if token[2]] for row in rows]
    d = [p - q for row in rows for q, p, _, _ in row]
    ratios = [
        math.exp(-statistics.fmean(p for _, p, _, _ in row))
        / math.exp(-statistics.fmean(q for q, _, _, _ in row))
        for row in rows
        if row
    ]
    return {
        "mismatch_k1": statistics.fmean(-x for x in d),
        "mismatch_k3": statistics.fmean(math.exp(x) - 1 - x for x in d),
        "mismatch_chi2": statistics.fmean(math.exp(2 * x) for x in d) - 1,
        "mismatch_max": max(abs(x) for x in d),
        "mismatch_share": statistics.fmean(abs(x) > 0.01 for x in d),
        "mismatch_ppl_ratio": statistics.fmean(ratios),
    }


def trained(rows: list[Tokens]) -> Tokens:
    return [token for row in rows for token in row[1:] if token[2]]


@given(RAGGED)
def test_mismatch_equals_formulas(rows: list[Tokens]) -> None:
    trainer, batch = make(rows)
    actual = mismatch_of(trainer, batch)
    if trained(rows):
        assert actual == pytest.approx(plainly(rows), rel=1e-9, abs=1e-9)
    else:
        assert actual.keys() == set(NAMES)
        assert all(math.isnan(value) for value in actual.values())


@given(RAGGED, st.integers(3, 5))
def test_each_lag_is_measured_by_itself(rows: list[Tokens], version: int) -> None:
    trainer, batch = make(rows)
    expected: dict[str, float] = {}
    for lag in {version - v for _, _, _, v in trained(rows)}:
        of_lag = [[(q, p, m and version - v == lag, v) for q, p, m, v in row] for row in rows]
        expected |= {f"{name}_lag{lag}": value for name, value in plainly(of_lag).items()}
    assert mismatch_by_lag(trainer, batch, version) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(RAGGED, st.integers(3, 5))
def test_staleness_counts_tokens_and_mixed_answers(rows: list[Tokens], version: int) -> None:
    _, batch = make(rows)
    staleness = staleness_of(batch, version)
    if not trained(rows):
        assert all(math.isnan(value) for value in staleness.values())
        return
    lags = [version - v for _, _, _, v in trained(rows)]
    kinds = [len({v for _, _, m, v in row[1:] if m}) for row in rows]
    assert staleness == pytest.approx(
        {
            "staleness_mean": statistics.fmean(lags),
            "staleness_max": max(lags),
            "mixed_versions": statistics.fmean(kind > 1 for kind in kinds if kind),
        }
    )


def test_equal_log_probs_have_no_mismatch() -> None:
    trainer, batch = make([[(-1.0, -1.0, True, 0)] * 3, [(-2.5, -2.5, True, 0)] * 2])
    assert mismatch_of(trainer, batch) == dict.fromkeys(NAMES, 0.0) | {"mismatch_ppl_ratio": 1.0}


def test_a_tiny_difference_is_not_lost_in_rounding() -> None:
    """float32 would make ``exp(d) - 1 - d`` zero: d**2 / 2 is below its resolution at 1."""
    trainer, batch = make([[(-1.0, -1.0 + 2**-12, True, 0)] * 3])
    assert mismatch_of(trainer, batch)["mismatch_k3"] == pytest.approx(2**-25, rel=1e-3)


@pytest.mark.parametrize(("sequences", "compared"), [(1, 1), (127, 127), (128, 64), (400, 67), (4096, 512)])
def test_mismatch_compares_part_of_large_batch(sequences: int, compared: int) -> None:
    _, batch = make([[(-1.0, -1.0, True, 0)] * 2] * sequences)
    assert compared_part(batch).num_sequences == compared
