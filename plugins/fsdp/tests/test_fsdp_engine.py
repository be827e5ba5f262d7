"""The FSDP engine on 1, 2 and 4 ranks against the plain model, and with bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsdp_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.checkpoint.tensor_files import SafetensorsFile
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.engine.loading import load_engine
from core_rl.errors import BatchError, OutOfDeviceMemory
from core_rl.launch.group import EngineGroup
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel

LOSS, BUDGET = support.LOSS, support.BUDGET


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    """Four ranks that every test initialises as it needs."""
    with EngineGroup("fsdp", support.fsdp_config(4), timeout_s=120) as ranks:
        yield ranks


def train(group: EngineGroup, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(group.train_batch(support.make_batch(step), LOSS, BUDGET)["loss"])
        group.lr_scheduler_step()
    return losses


@pytest.mark.nightly
def test_compiled_blocks_keep_gradients(group: EngineGroup) -> None:
    batches = [
        support.make_batch(seed, lengths) for seed, lengths in enumerate([(5, 9), (7, 3, 8, 2), (17,)])
    ]
    actual = []
    for compiled in (False, True):
        group.initialize(config=support.fsdp_config(1, compile=compiled))
        for batch in batches:
            group.forward_backward(batch, LOSS, BUDGET)
        actual.append(group.named_tensors("grads"))
    torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-6)


def test_fewer_sequences_than_ranks_terminate(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(4))
    batch = support.make_batch(2, lengths=(9, 4))
    assert group.train_batch(batch, LOSS, BUDGET)["update_successful"] == 1
    assert group.forward(batch, BUDGET)["logprobs"].shape == (13,)


@pytest.mark.parametrize("dp", [1, 2])
def test_resume_is_bitwise_on_the_same_layout(group: EngineGroup, tmp_path: Path, dp: int) -> None:
    group.initialize(config=support.fsdp_config(dp))
    train(group, 0, 3)
    meta = SaveLoadMeta(path=str(tmp_path / "saved"))
    group.set_version(7)
    group.save(meta)
    losses = train(group, 3, 6)
    after = support.state(group)
    group.initialize(config=support.fsdp_config(dp))
    group.load(meta)
    assert group.get_version() == 7 and group.progress.lr_steps == 3
    assert train(group, 3, 6) == losses
    assert support.equal(support.state(group), after)


def test_bfloat16_computes_in_half_and_updates_in_float32(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(2))
    exact = group.forward(support.make_batch(0), BUDGET)["logprobs"]
    group.initialize(config=support.fsdp_config(2, dtype="bfloat16"))
    rounded = group.forward(support.make_batch(0), BUDGET)["logprobs"]
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1)
    before = group.named_tensors("master")
    assert group.train_batch(support.make_batch(0), LOSS, BUDGET)["update_successful"] == 1
    after = group.named_tensors("master")
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    # The learning rate is warming up at a third of 1e-2; bfloat16 weights could not move by less than an ulp.
    assert 0 < moved.abs().median() < 4e-3
    assert {value.dtype for value in group.named_tensors("params").values()} == {torch.bfloat16}


def test_nan_on_any_rank_skips_step(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(4))
    train(group, 0, 1)
    before = support.state(group)
    batch = SequenceBatch.from_sequences([[1, 2, 3], [4, 5, 6], [7, 60, 8], [9, 10, 11]])
    metrics = group.train_batch(batch, LossSpec(fn=support.sometimes_nan), BUDGET)
    assert metrics["update_successful"] == 0
    assert support.equal(support.state(group), before)


def test_long_sequence_fails_all_ranks(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(2))
    with pytest.raises(BatchError, match="has 40 tokens, and max_tokens is 32"):
        group.train_batch(support.make_batch(0, lengths=(40, 4, 4)), LOSS, BUDGET)
    assert group.train_batch(support.make_batch(0), LOSS, BUDGET)["update_successful"] == 1


def test_device_memory_is_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is nothing to ask; that it is asked there shows the moment."""
    directory = ModelStore(tmp_path).directory(TinyModel(family="qwen3", seed=0))
    config = support.fsdp_config(1).model_copy(update={"model": ModelConfig(path=str(directory))})
    engine, read = load_engine("fsdp", config), list[str]()

    def full(context: object, model: torch.nn.Module) -> None:
        raise OutOfDeviceMemory(f"{sum(p.numel() for p in model.parameters())} weights, read: {read}")

    monkeypatch.setattr("core_rl_fsdp.engine.require_device_memory", full)
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name, slices=None: read.append(name))
    with pytest.raises(OutOfDeviceMemory, match=r"^[1-9]\d+ weights, read: \[\]$"):
        engine.initialize()
