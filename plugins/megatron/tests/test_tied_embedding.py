"""A tied embedding of a large vocabulary: the first and the last stage each cut a copy over data parallel ranks."""

from __future__ import annotations

import megatron_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine

LOSS, CUT = LossSpec(fn=support.weighted_nll), MicroBatchSpec(max_tokens=24)
NAME = "model.embed_tokens.weight"
LARGE = {"vocab_size": 33_003}


def slices_of_embedding(engine: TrainEngine) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Replica, offsets and shape of this rank's slices of the embedding's gradient."""
    slices = [part for part in engine.backend.state().local("grads") if part.name == NAME]
    return [(part.replica, part.offsets, part.shape) for part in slices]


@pytest.mark.nightly
def test_tied_copies_count_once_across_stages() -> None:
    """Megatron gives a shared embedding a bucket of its own (param_and_grad_buffer.py)."""
    with support.started(support.config("reference", model=LARGE), "reference") as group:
        expected = group.train_batch(support.batch(), LOSS, CUT)
        weights = group.named_tensors("master")[NAME]
    layout, spread = {"dp": 2, "pp": 2}, {"distributed_optimizer": True}
    with support.started(support.config(layout=layout, options=spread, model=LARGE)) as group:
        actual = group.train_batch(support.batch(), LOSS, CUT)
        slices = group.run(slices_of_embedding)
        torch.testing.assert_close(group.named_tensors("master")[NAME], weights, rtol=1e-4, atol=1e-6)
    for first, last in zip(slices[:2], slices[2:], strict=True):
        assert {replica for replica, *_ in first} == {0}
        assert last == [(1, offsets, shape) for _, offsets, shape in first]
    assert slices[0] != slices[1]
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
