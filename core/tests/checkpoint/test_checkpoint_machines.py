"""Checkpoints at URLs from several machines, which share no directory: processes with directories of their own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from object_store import PROTOCOL, ObjectStore
from torch._C._distributed_c10d import FileStore

from core_rl.checkpoint import local
from core_rl.checkpoint.background import DeferredWrite, write_in_background
from core_rl.checkpoint.directory import open_checkpoint, write_checkpoint
from core_rl.distributed.comm import Comm
from core_rl.errors import CoreRLError
from core_rl.launch.process import start_process

MACHINES = (0, 0, 1, 1)
"""The machine of each rank."""
FILES = {f"rank{rank}": f"of rank {rank}" for rank in range(len(MACHINES))}


@dataclass(frozen=True)
class Outcome:
    """Findings of a rank, and remaining temporary files of its machine."""

    found: Any
    left: list[str]


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def on_machines(tmp_path: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(world, *args)`` on each rank, or its error as text; nothing is left on any machine."""
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    meeting = tmp_path / uuid.uuid4().hex
    processes = [
        start_process(_rank, (rank, tmp_path, meeting, results, function, args), f"rank {rank}")
        for rank in range(len(MACHINES))
    ]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(MACHINES)
    outcomes: dict[int, Outcome] = dict(results.get() for _ in processes)
    assert [outcomes[rank].left for rank in sorted(outcomes)] == [[]] * len(MACHINES)
    return [outcomes[rank].found for rank in sorted(outcomes)]


def _rank(
    rank: int, tmp_path: Path, meeting: Path, results: Any, function: Callable[..., Any], args: Any
) -> None:
    machine = tmp_path / f"machine{MACHINES[rank]}"
    (machine / "scratch").mkdir(parents=True, exist_ok=True)
    os.chdir(machine)
    tempfile.tempdir = "scratch"  # the same name on each machine, and another directory
    store = FileStore(str(meeting), len(MACHINES))
    dist.init_process_group("gloo", rank=rank, world_size=len(MACHINES), store=store)
    world = Comm(dist.group.WORLD)
    try:
        found = function(world, *args)
    except CoreRLError as error:
        found = f"{type(error).__name__}: {error}"
    world.barrier()
    results.put((rank, Outcome(found, names_in(Path("scratch")))))
    world.barrier()
    os._exit(0)


def write_own(world: Comm) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / f"rank{world.rank}").write_text(f"of rank {world.rank}")

    return write


def save(world: Comm, url: str) -> None:
    write_checkpoint(url, write_own(world), world, kind="text")


def save_later(world: Comm, url: str) -> None:
    pending = write_in_background(
        url, lambda directory: DeferredWrite(write_own(world)), world, kind="text", state={}, timeout_s=60.0
    )
    pending.wait(world)


def load(world: Comm, url: str) -> dict[str, str]:
    with open_checkpoint(url, world, kind="text") as directory:
        return {file.name: file.read_text() for file in directory.iterdir() if file.suffix != ".json"}


def save_and_load(world: Comm, url: str, write: Callable[[Comm, str], None]) -> dict[str, str]:
    write(world, url)
    return load(world, url)


@pytest.mark.parametrize("protocol", ["file", PROTOCOL])
@pytest.mark.parametrize("write", [save, save_later])
def test_each_machine_uploads_its_files_and_downloads_all(
    tmp_path: Path, protocol: str, write: Callable[[Comm, str], None]
) -> None:
    url = f"{protocol}://{tmp_path}/store/a"
    assert on_machines(tmp_path, save_and_load, url, write) == [FILES] * len(MACHINES)
    assert names_in(tmp_path / "store" / "a") == ["manifest.json", *FILES]


def save_where_last_ranks_are_first(world: Comm, url: str) -> None:
    """The directory of each machine is made by its last rank, and led by its first."""
    make = local._make

    def make_late(root: Path, rank: int, stack: ExitStack) -> None:
        if rank % 2 == 0:
            world.barrier()
        make(root, rank, stack)
        if rank % 2 == 1:
            world.barrier()

    with mock.patch.object(local, "_make", make_late):
        save_later(world, url)


def test_first_rank_leads_its_machine(tmp_path: Path) -> None:
    url = f"{PROTOCOL}://{tmp_path}/store/a"
    assert on_machines(tmp_path, save_and_load, url, save_where_last_ranks_are_first) == [FILES] * len(
        MACHINES
    )


class Refusing:
    """Uploads of one rank fail, from a file of it on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.put = ObjectStore.put_file

    def __call__(self, store: ObjectStore, source: str, target: str) -> None:
        if dist.get_rank() == self.rank:
            raise OSError(f"the connection was reset at {Path(target).name}")
        self.put(store, source, target)


def replace_and_fail(
    world: Comm, url: str, write: Callable[[Comm, str], None], rank: int
) -> tuple[str, dict[str, str]]:
    write_checkpoint(url, lambda directory: (directory / "old").touch(), world, kind="text")
    refusing = Refusing(rank)
    ObjectStore.put_file = lambda *args: refusing(*args)  # type: ignore[method-assign]  # noqa: PLW0108  # to be a method
    try:
        write(world, url)
    except CoreRLError as error:
        ObjectStore.put_file = refusing.put  # type: ignore[method-assign]
        return str(error), load(world, url)
    raise AssertionError("the failed upload was not reported")


@pytest.mark.parametrize(("write", "rank"), [(save, 2), (save, 0), (save_later, 2), (save_later, 0)])
def test_failed_upload_names_rank_keeps_old_checkpoint(
    tmp_path: Path, write: Callable[[Comm, str], None], rank: int
) -> None:
    url = f"{PROTOCOL}://{tmp_path}/store/a"
    for message, found in on_machines(tmp_path, replace_and_fail, url, write, rank):
        assert url in message
        assert f"rank {rank}: OSError: the connection was reset" in message
        assert message.count("rank ") == 1
        assert found == {"old": ""}


def test_killed_upload_is_no_checkpoint(tmp_path: Path) -> None:
    url = f"{PROTOCOL}://{tmp_path}/store/a"
    on_machines(tmp_path, save, url)
    (tmp_path / "store" / "a" / "manifest.json").unlink()
    answers = on_machines(tmp_path, load, url)
    assert all("manifest.json is missing: the save did not finish" in answer for answer in answers)


def test_machine_without_temporary_directory_is_named(tmp_path: Path) -> None:
    url = f"{PROTOCOL}://{tmp_path}/store/a"
    for answer in on_machines(tmp_path, save_without_scratch, url):
        assert "ranks 0, 1: scratch" in answer.replace("/core-rl", "")
        assert "set the environment variable TMPDIR" in answer


def save_without_scratch(world: Comm, url: str) -> None:
    if world.rank == 0:
        Path("scratch").rename("moved")
    try:
        save(world, url)
    finally:
        if world.rank == 0:
            Path("moved").rename("scratch")
