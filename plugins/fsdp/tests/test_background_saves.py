"""Saves in the background on several ranks: true snapshots in each format, and files left by a killed rank."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import fsdp_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, TensorKind
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.portable import DcpFiles
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.errors import GroupError
from core_rl.launch.group import EngineGroup

LOSS = LossSpec(fn=support.loss, outputs=("logprobs", "entropy"))
BUDGET = MicroBatchSpec(max_tokens=32)
LAYOUTS = (ParallelLayout(dp=2), ParallelLayout(tp=2))


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=120) as ranks:
        yield ranks


def save_and_train(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    engine.save(meta)
    for seed in (5, 6):
        engine.train_batch(engine.shard_data(support.make_batch(seed)), LOSS, BUDGET)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_hold_the_state_at_save(group: EngineGroup, tmp_path: Path, layout: ParallelLayout) -> None:
    group.initialize(config=support.fsdp_config(layout, dtype="bfloat16"))
    group.train_batch(support.make_batch(0), LOSS, BUDGET)
    required: dict[CheckpointFormat, tuple[TensorKind, ...]] = {
        "portable": ("master", "exp_avg", "exp_avg_sq"),
        "hf": ("params",),
    }
    for form, kinds in required.items():
        expected = {
            f"optimizer.state.{name}.{kind}" if kind.startswith("exp") else name: value
            for kind in kinds
            for name, value in group.named_tensors(kind).items()
        }
        path = tmp_path / form
        group.run(save_and_train, SaveLoadMeta(path=str(path), format=form, asynchronous=True))
        group.wait_for_saves()
        written = TensorFiles(path, "model") if form == "hf" else DcpFiles(path)
        assert {name for name in written.names() if not name.endswith(".step")} == set(expected)
        for name, value in expected.items():
            assert written.read(name).dtype == value.dtype
            assert torch.equal(written.read(name), value), (form, name)
        hidden = {entry.name for entry in path.iterdir() if entry.name.startswith(".")}
        assert hidden == ({".metadata"} if form == "portable" else set())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("seed", "victim"), [(0, 0), (1, 1), (2, 0)])
def test_killed_rank_leaves_complete_checkpoint(tmp_path: Path, seed: int, victim: int) -> None:
    path = str(tmp_path / "a")
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=60) as ranks:
        ranks.set_version(1)
        ranks.save(SaveLoadMeta(path=path))
        ranks.train_batch(support.make_batch(0), LOSS, BUDGET)
        ranks.set_version(2)
        ranks.save(SaveLoadMeta(path=path, asynchronous=True))
        time.sleep(random.Random(seed).uniform(0.0, 0.03))
        os.kill(ranks.pids[victim], signal.SIGKILL)
        with pytest.raises(GroupError):
            ranks.wait_for_saves()
        assert read_manifest(Path(path)).state["progress"]["version"] in (1, 2)
        with open_checkpoint(path, Comm(), kind="sharded"):  # verifies every digest
            pass
        ranks.restart()
        ranks.initialize()
        ranks.load(SaveLoadMeta(path=path))
        assert ranks.get_version() in (1, 2)
        ranks.save(SaveLoadMeta(path=path, asynchronous=True))
        ranks.wait_for_saves()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
