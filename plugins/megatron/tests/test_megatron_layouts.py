"""One training run, moved between layouts and engines: its losses equal an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)
PADDING = 40
SPREAD = {"distributed_optimizer": True}
TENSOR = ("megatron", {"tp": 2}, None)
INTERLEAVED = ("megatron", {"pp": 2}, {"virtual_stages": 2})

Setup = tuple[str, dict[str, Any], dict[str, Any] | None]
MOVES: list[tuple[Setup, Setup, str]] = [
    (TENSOR, INTERLEAVED, "sharded"),
    (("megatron", {"dp": 2, "pp": 2}, SPREAD), ("megatron", {"dp": 2}, SPREAD), "sharded"),
    (TENSOR, ("fsdp", {"dp": 2}, None), "portable"),
]
MORE_MOVES: list[tuple[Setup, Setup, str]] = [
    (TENSOR, ("megatron", {"pp": 2}, None), "sharded"),
    (("megatron", {"dp": 2}, SPREAD), ("megatron", {"tp": 2, "sequence_parallel": True}, None), "sharded"),
    (("megatron", {"cp": 2}, SPREAD), ("megatron", {"tp": 2, "pp": 2}, None), "sharded"),
    (("fsdp", {"dp": 2}, None), ("megatron", {"tp": 2, "pp": 2}, None), "portable"),
    (("megatron", {"dp": 2}, SPREAD), ("fsdp", {"dp": 2}, None), "portable"),
]


def _start(setup: Setup) -> EngineGroup:
    engine, layout, options = setup
    return support.started(support.config(engine, layout, options), engine)


def _train(group: EngineGroup, steps: range) -> list[float]:
    losses = []
    for step in steps:
        metrics = group.train_batch(support.batch(step), LOSS, CUT)
        group.lr_scheduler_step()
        losses += [metrics["loss"], metrics["grad_norm"]]
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "second", "form"),
    [*MOVES, *(pytest.param(*move, marks=pytest.mark.nightly) for move in MORE_MOVES)],
    ids=str,
)
def test_training_continues_at_new_layout(first: Setup, second: Setup, form: Any, tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "checkpoint"), format=form)
    with _start(first) as group:
        _train(group, range(3))
        group.save(meta)
        expected = _train(group, range(3, 6))
    with _start(second) as group:
        group.load(meta)
        actual = _train(group, range(3, 6))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


def test_layouts_change_in_a_running_group(tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "checkpoint"))
    with _start(TENSOR) as group:
        before = group.pids
        assert group.run(support.receives_tensors) == [True, False]
        _train(group, range(2))
        group.save(meta)
        group.initialize(config=support.config("megatron", {"pp": 2}))
        group.load(meta)
        _train(group, range(2, 3))
        assert group.pids == before
        assert group.run(support.receives_tensors) == [False, True]  # the last stage writes


def test_hidden_states_of_all_stages_come() -> None:
    setups: list[Setup] = [("megatron", {"pp": 2, "cp": 2}, {"virtual_stages": 2}), ("reference", {}, None)]
    states = []
    for setup in setups:
        with _start(setup) as group:
            states.append(group.forward(support.batch(), CUT, ("hidden_states",))["hidden_states"])
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.nightly
def test_recomputation_changes_nothing() -> None:
    results = []
    for choice in ("none", "selective", "full"):
        with support.started(support.config(layout={"pp": 2}, options={"recompute": choice})) as group:
            results.append(_train(group, range(2)))
    torch.testing.assert_close(results[1:], [results[0]] * 2, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=["one", "tp", "pp"]
)
def test_padding_token_gets_no_gradient(layout: dict[str, Any]) -> None:
    """Match transformers (``padding_idx``), also where a response contains the token."""
    data = support.batch()
    assert bool((data.input_ids == PADDING).any())
    actual = []
    for engine, where in (("reference", {}), ("megatron", layout)):
        config = support.config(engine, where, model={"pad_token_id": PADDING})
        with support.started(config, engine) as group:
            group.forward_backward(data, LOSS, CUT)
            actual.append(group.named_tensors("grads")["model.embed_tokens.weight"])
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_replicas_save_equal_parts(tmp_path: Path) -> None:
    """Without the distributed optimizer, each data parallel rank has everything."""
    with _start(("megatron", {"dp": 2}, None)) as group:
        group.save(SaveLoadMeta(path=str(tmp_path)))
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("shards/rank-*.safetensors"))]
    assert len(sizes) == 2
    assert min(sizes) > 0.9 * max(sizes)
