"""Drawn batches: legal, of every kind, and rebuilt by the code that a failure shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import count_micro_batches
from core_rl_conformance.checks.properties import EDGES, DrawnBatch, batches

VOCABULARY = 13


def _built(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@settings(derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))
@given(batches())
def test_printed_code_rebuilds_batch(drawn: DrawnBatch) -> None:
    names, expected = _built(drawn.code(VOCABULARY)), drawn.ragged(VOCABULARY).batch()
    batch = names["batch"]
    assert isinstance(batch, SequenceBatch) and names["mb_spec"] == drawn.cut
    assert torch.equal(batch.input_ids, expected.input_ids) and batch.lengths == expected.lengths
    for name in ("loss_mask", "advantages", "target"):
        assert torch.equal(batch[name], expected[name]) and batch[name].dtype == expected[name].dtype
    assert count_micro_batches(batch, drawn.cut) >= 1


@pytest.mark.parametrize("edge", EDGES)
def test_edges_train_something(edge: DrawnBatch) -> None:
    assert bool(edge.ragged(VOCABULARY).batch().loss_mask.any())
