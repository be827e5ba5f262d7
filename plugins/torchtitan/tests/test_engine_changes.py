"""Training that begins under one engine and goes on under the next: checkpoints and recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import titan_support as support
import torch
from changing_engines import violations_of_changes

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.data.micro_batch import MicroBatchSpec

LOSS, CUT = LossSpec(fn=support.weighted_nll), MicroBatchSpec(max_tokens=24)
STAGES = (("fsdp", {"dp": 2}), ("torchtitan", {"dp": 2, "tp": 2}), ("megatron", {"pp": 2}))
"""Engines and their layouts, two steps of each."""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_portable_checkpoint_moves_through_three_engines(kind: str, tmp_path: Path) -> None:
    """Weights, moments and the count of steps: six steps equal six of an engine that never changed."""
    model = {"model_type": kind, "tie_word_embeddings": kind == "qwen3"}
    with support.started(support.config("reference", model=model), "reference") as group:
        expected = [group.train_batch(support.batch(seed), LOSS, CUT) for seed in range(6)]
        weights = group.named_tensors("master")
    step = 0
    for engine, layout in STAGES:
        with support.started(support.config(engine, layout, model=model), engine) as group:
            if step:
                group.load(SaveLoadMeta(path=str(tmp_path / str(step)), format="portable"))
            for _ in range(2):
                actual = group.train_batch(support.batch(step), LOSS, CUT)
                assert actual["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)
                step += 1
            group.save(SaveLoadMeta(path=str(tmp_path / str(step)), format="portable"))
            moved = group.named_tensors("master")
    torch.testing.assert_close(moved, weights, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_recipe_changes_engines_within_rounding(tmp_path: Path) -> None:
    """GRPO under fsdp, torchtitan and megatron, with the curve of a run that is never broken."""
    assert not violations_of_changes(tmp_path, STAGES)
