"""Saves in the background: the target meanwhile, failures, and files left by a kill."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_support as support
import pytest
import torch
from checkpoint_support import TIMEOUT_S, hidden, in_child, killed_at, load_text, on_ranks, save_text
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, TensorKind
from core_rl.checkpoint import background
from core_rl.checkpoint.background import BackgroundSave, DeferredWrite, Write, write_in_background
from core_rl.checkpoint.manifest import read_manifest, records_of
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.errors import CheckpointError, CheckpointNotFound

LOSS = LossSpec(fn=support.weighted_nll)
ONE = MicroBatchSpec(count=1)
CALLS = ("fsync", "mkdir", "rename", "rmdir", "unlink")


def begin(
    path: Path, world: Comm, write: Write, *, text: str = "", timeout_s: float = TIMEOUT_S
) -> BackgroundSave:
    def prepare(directory: Path) -> DeferredWrite:
        (directory / f"now{world.rank}").write_text(text)
        return DeferredWrite(write)

    return write_in_background(str(path), prepare, world, kind="text", state={}, timeout_s=timeout_s)


def later(text: str, rank: int = 0) -> Write:
    return lambda directory: _write(directory / f"later{rank}", text)


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def test_old_checkpoint_stays_until_ranks_have_written(tmp_path: Path) -> None:
    path, gate = tmp_path / "a", threading.Event()
    save_text(path, weights="old")

    def save(world: Comm) -> dict[str, str]:
        def write(directory: Path) -> None:
            if world.rank == 2:
                assert gate.wait(TIMEOUT_S)
            later(f"new {world.rank}", world.rank)(directory)

        saving = begin(path, world, write)
        world.barrier()
        meanwhile = load_text(path)
        world.barrier()
        gate.set()
        saving.wait(world)
        return meanwhile

    assert on_ranks(3, save) == [{"weights": "old"}] * 3
    found = load_text(path)
    assert found == {
        f"{when}{rank}": text for rank in range(3) for when, text in (("now", ""), ("later", f"new {rank}"))
    }
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("bad", [0, 1])
def test_background_rank_failure_raises_on_all(
    tmp_path: Path, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    save_text(path, weights="old")

    def save(world: Comm) -> None:
        def write(directory: Path) -> None:
            if world.rank == bad:
                raise OSError(28, "No space left on device", str(directory / "shards"))

        saving = begin(path, world, write)
        saving.wait(world)

    with caplog.at_level(logging.ERROR):
        raised = on_ranks(2, save)
    assert [type(error) for error in raised] == [CheckpointError] * 2
    for error in raised:
        assert (
            f"in the background failed, and what was there before is untouched: rank {bad}: shards: No sp"
            in str(error)
        )
    assert "No space left on device" in caplog.text
    assert load_text(path) == {"weights": "old"}
    assert hidden(tmp_path) == []


def test_late_rank_is_named(tmp_path: Path) -> None:
    gate = threading.Event()

    def save(world: Comm) -> None:
        def write(directory: Path) -> None:
            if world.rank == 1:
                gate.wait(TIMEOUT_S)

        saving = begin(tmp_path / "a", world, write, timeout_s=1.0)
        if world.rank == 0:
            saving._thread.join(TIMEOUT_S)
            gate.set()
        saving.wait(world)

    raised = on_ranks(2, save)
    assert all("rank(s) [1] did not finish writing within 1 s" in str(error) for error in raised)
    assert not (tmp_path / "a").exists()


def test_failed_snapshot_raises_at_once(tmp_path: Path) -> None:
    def fail(directory: Path) -> DeferredWrite:
        raise RuntimeError("no snapshot")

    save_text(tmp_path / "a", weights="old")
    with pytest.raises(CheckpointError, match=": RuntimeError: no snapshot"):
        write_in_background(str(tmp_path / "a"), fail, Comm(), kind="text", state={}, timeout_s=1.0)
    assert load_text(tmp_path / "a") == {"weights": "old"}
    assert hidden(tmp_path) == []


# ------------------------------------------------------------------- killed


@pytest.mark.parametrize("replace", [False, True])
def test_a_save_killed_at_any_point_loses_nothing(tmp_path: Path, replace: bool) -> None:
    seen = set()
    for point in itertools.count(1):
        path = tmp_path / str(point) / "a"
        path.parent.mkdir()
        if replace:
            save_text(path, later0="old", now0="old")

        def save(path: Path = path, point: int = point) -> None:
            with killed_at(point, os, CALLS):
                begin(path, Comm(), later("new"), text="new").wait(Comm())

        code = in_child(save)
        found = found_at(path)
        assert found in (
            {"later0": "old", "now0": "old"} if replace else {},
            {"later0": "new", "now0": "new"},
        )
        seen.add(found.get("later0"))
        save_text(path, weights="next")
        assert load_text(path) == {"weights": "next"}
        assert hidden(path.parent) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert point > 8
    assert seen == {"old" if replace else None, "new"}


def found_at(path: Path) -> dict[str, str]:
    try:
        return load_text(path)
    except CheckpointNotFound:
        return {}


@pytest.mark.parametrize("seed", range(12))
def test_killed_run_leaves_complete_checkpoint(tmp_path: Path, seed: int) -> None:
    """The process saves one version after the other; whichever is found is complete and of one version."""
    path = tmp_path / "a"
    pid = os.fork()
    if pid == 0:
        try:
            for version in range(10_000):
                text = f"{version:06d}" * 20_000
                begin(path, Comm(), later(text), text=text).wait(Comm())
        finally:
            os._exit(1)
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0.0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = load_text(path)
    assert found.keys() == {"now0", "later0"}
    assert found["now0"] == found["later0"] == found["now0"][:6] * 20_000
    save_text(path, weights="next")
    assert hidden(tmp_path) == []


PROGRAM = """
import sys, time
from pathlib import Path
from typing import Any
from core_rl.checkpoint.background import DeferredWrite, write_in_background
from core_rl.distributed.comm import Comm

def write(directory):
    time.sleep(0.3)
    (directory / "later0").write_text("new")

write_in_background(sys.argv[1], lambda directory: DeferredWrite(write), Comm(), kind="text", state={}, timeout_s=60.0)
"""


def test_ending_program_completes_its_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "a")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load_text(tmp_path / "a") == {"later0": "new"}


# ------------------------------------------------------------------ engines


def held(engine: TrainEngine) -> dict[str, Tensor]:
    kinds: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}/{name}": value.clone()
        for kind in kinds
        for name, value in engine.named_tensors(kind)
        if value is not None
    }


def train(engine: TrainEngine, seed: int) -> None:
    engine.train_batch(support.batch(seed), LOSS, ONE)


def slowly(engine: TrainEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let files that are written in the background wait for the event."""
    gate, real = threading.Event(), background._write_part

    def write_part(staged: Path, rank: int, deferred: DeferredWrite) -> None:
        assert gate.wait(TIMEOUT_S)
        real(staged, rank, deferred)

    monkeypatch.setattr(background, "_write_part", write_part)
    return gate


@pytest.fixture
def engine() -> Iterator[TrainEngine]:
    built = support.engine()
    yield built
    built.destroy()


def test_writer_thread_hashes_its_shards(
    engine: TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0 hashes nothing of other ranks, whose files it may have to fetch."""
    real, names = records_of, list[list[str]]()

    def noted(directory: Path, found: list[str], threads: int) -> Any:
        names.append(sorted(found))
        return real(directory, found, threads)

    monkeypatch.setattr(background, "records_of", noted)
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="sharded", asynchronous=True))
    engine.wait_for_saves()
    assert names == [["shards/rank-00000.safetensors"], []]
    assert list(read_manifest(tmp_path / "a").files) == ["shards/rank-00000.safetensors"]


@pytest.mark.parametrize("form", ["sharded", "portable", "hf"])
def test_background_save_is_a_snapshot(
    engine: TrainEngine, form: CheckpointFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = slowly(engine, monkeypatch)
    train(engine, 0)
    engine.set_version(4)
    expected = held(engine)
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=form, asynchronous=True)
    engine.save(meta)
    engine.set_version(5)
    for seed in (1, 2):
        train(engine, seed)
    assert not (tmp_path / "a").exists()
    gate.set()
    engine.wait_for_saves()
    engine.load(meta)
    names = [name for name in expected if form != "hf" or name.startswith("master/")]
    found = held(engine)
    assert all(torch.equal(found[name], expected[name]) for name in names)
    assert engine.get_version() == (5 if form == "hf" else 4)


def test_next_save_waits_for_previous_save(
    engine: TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = slowly(engine, monkeypatch)
    meta = SaveLoadMeta(path=str(tmp_path / "a"), asynchronous=True)
    engine.save(meta)
    threading.Timer(0.1, gate.set).start()
    train(engine, 0)
    expected = held(engine)
    engine.save(meta)
    train(engine, 1)
    engine.load(meta)
    found = held(engine)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert hidden(tmp_path) == []


def save_again(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    engine.save(meta)


def load_it(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    engine.load(meta)


def wait_for_it(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    engine.wait_for_saves()


def destroy(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    engine.destroy()


@pytest.mark.parametrize("act", [save_again, load_it, wait_for_it, destroy])
def test_background_failure_is_raised_once(
    act: Callable[[TrainEngine, SaveLoadMeta], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = support.engine()
    meta = SaveLoadMeta(path=str(tmp_path / "a"))
    engine.save(meta)
    train(engine, 0)

    def full(file: Path, tensors: object, metadata: object) -> None:
        raise CheckpointError(f"{file.name}: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("core_rl.checkpoint.shards.write_file", full)
        engine.save(SaveLoadMeta(path=str(tmp_path / "a"), asynchronous=True))
        train(engine, 1)  # continues
        with pytest.raises(
            CheckpointError, match="in the background failed.*rank-00000.safetensors: No space"
        ):
            act(engine, meta)
    if act is destroy:
        engine = support.engine()
    engine.load(meta)
    assert engine.progress.updates == 0
    engine.destroy()
