"""No engine trains on half of a batch: failures of a loss, and of a backend, on a single rank of two."""

from __future__ import annotations

import time
from collections.abc import Iterator

import backend_support as support
import engine_support
import pytest
import torch
from backend_support import BREAKS_BACKEND, BREAKS_LOSS, LOSS, ONE, RunsOutOfMemory, broken, spec

from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineStateError, LossError, OutOfDeviceMemory
from core_rl.launch.group import EngineGroup

LIMIT_S = 10.0
"""Time limit of a rank for its peers."""
BATCH = engine_support.batch(lengths=(5, 9, 3, 7))


@pytest.fixture(scope="module")
def ranks() -> Iterator[EngineGroup]:
    config = engine_support.config().model_copy(update={"layout": ParallelLayout(dp=2)})
    with EngineGroup(support.BREAKS, config, timeout_s=120, threads_per_rank=1) as group:
        yield group


@pytest.fixture
def group(ranks: EngineGroup) -> EngineGroup:
    ranks.initialize()
    return ranks


def test_loss_error_raises_on_all_ranks(group: EngineGroup) -> None:
    answers = group.run(support.pass_and_step, broken(BATCH, BREAKS_LOSS))
    for of_pass, of_step in answers:
        assert of_pass.startswith("LossError: ") and "a weight is negative" in of_pass
        assert of_step.startswith("EngineStateError: optimizer_step() after a pass that raised")
    with pytest.raises(EngineStateError, match=r"call optimizer_zero_grad\(\) first"):
        group.forward_backward(BATCH, LOSS, ONE)


@pytest.mark.parametrize("method", ["forward_backward", "train_batch", "eval_batch"])
def test_training_continues_after_loss_raises(group: EngineGroup, method: str) -> None:
    with pytest.raises(LossError, match="a weight is negative"):
        getattr(group, method)(broken(BATCH, BREAKS_LOSS), LOSS, ONE)
    group.optimizer_zero_grad()
    group.forward_backward(BATCH, LOSS, ONE)
    after = group.optimizer_step(), group.named_tensors("master")
    group.initialize()
    group.forward_backward(BATCH, LOSS, ONE)
    untouched = group.optimizer_step(), group.named_tensors("master")
    assert after[0] == untouched[0]
    assert all(torch.equal(tensor, untouched[1][name]) for name, tensor in after[1].items())


def test_out_of_memory_names_micro_batch_and_field() -> None:
    lone = spec(RunsOutOfMemory)
    engine = load_engine(lone, engine_support.config())
    assert isinstance(engine, TrainEngine)
    engine.initialize()
    says = (
        r"with [12] of 3 micro-batches begun; the next one has \d tokens in \d sequences \(the longest has \d\), and "
        r"the largest 9 tokens\nfix: lower the tokens of a micro-batch \(MicroBatchSpec.max_tokens\)"
    )
    data = engine_support.batch(lengths=(5, 9, 3, 7))
    weights = data["weight"].clone()
    weights[0] = BREAKS_BACKEND
    with pytest.raises(OutOfDeviceMemory, match=says):
        engine.train_batch(data.with_tokens(weight=weights), LOSS, MicroBatchSpec(max_tokens=9))
    engine.optimizer_zero_grad()
    engine.train_batch(data, LOSS, MicroBatchSpec(max_tokens=5000))  # a lone rank can continue
    engine.destroy()


def test_backend_raising_on_single_rank_fails_engine(ranks: EngineGroup) -> None:
    patience, ranks.timeout_s = ranks.timeout_s, LIMIT_S
    ranks.initialize()
    ranks.timeout_s = patience
    begin = time.monotonic()
    answers = ranks.run(support.calls_after_a_pass, broken(BATCH, BREAKS_BACKEND))
    assert time.monotonic() - begin < LIMIT_S + 60.0
    assert sum(text["pass"] == "RuntimeError: the kernel broke" for text in answers) == 1
    for text in answers:
        of_pass, of_destroy = text.pop("pass"), text.pop("destroy")
        assert of_pass and not of_destroy
        for name, message in text.items():
            assert f"{name}() on an engine that has failed: {of_pass}" in message
