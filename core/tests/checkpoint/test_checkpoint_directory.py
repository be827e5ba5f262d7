"""Checkpoint directories: whole or not at all, whatever happens during a save."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import DAMAGE, hidden, in_child, killed_at, load_text, on_ranks, save_text
from safetensors import SafetensorError

from core_rl.checkpoint import directory as directory_module
from core_rl.checkpoint.directory import open_checkpoint, write_checkpoint
from core_rl.checkpoint.manifest import FileRecord, Manifest, parse_manifest, read_manifest
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.distributed.comm import Comm
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    WeightsError,
)

FILES = {"weights": "0123456789", "folder__deep__notes": "abcdef", "empty": ""}


def test_saved_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    save_text(path, **FILES)
    assert load_text(path) == FILES
    assert read_manifest(path).state == {"files": sorted(FILES)}


def test_save_replaces_previous_checkpoint(tmp_path: Path) -> None:
    save_text(tmp_path / "a", **FILES)
    save_text(tmp_path / "a", weights="new")
    assert load_text(tmp_path / "a") == {"weights": "new"}
    assert hidden(tmp_path) == []


def test_symbolic_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("old", "new"):
        save_text(tmp_path / "link", weights=text)
    assert (tmp_path / "link").is_symlink()
    assert load_text(tmp_path / "real") == {"weights": "new"}


def test_all_users_may_read_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_text(tmp_path / "a", **FILES)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_ranks_share_the_directory(tmp_path: Path) -> None:
    path = str(tmp_path / "a")

    def save(world: Comm) -> None:
        def write(directory: Path) -> None:
            (directory / f"rank{world.rank}").write_text("x" * world.rank)

        write_checkpoint(path, write, world, kind="text")

    assert on_ranks(3, save) == [None] * 3
    assert load_text(path) == {"rank0": "", "rank1": "x", "rank2": "xx"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/part-7"), "part-7: No space left on device"),
        (SafetensorError("I/O error: File too large"), "File too large"),
        (WeightsError("missing 'lm_head.weight'"), "missing 'lm_head.weight'"),
        (KeyError("moment"), "KeyError: 'moment'"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_rank_failure_raises_on_all(tmp_path: Path, error: Exception, reason: str, culprit: int) -> None:
    path = str(tmp_path / "a")
    save_text(path, **FILES)

    def save(world: Comm) -> None:
        def write(directory: Path) -> None:
            (directory / f"rank{world.rank}").write_text("new")
            if world.rank == culprit:
                raise error

        write_checkpoint(path, write, world, kind="text")

    raised = on_ranks(3, save)
    assert [type(found) for found in raised] == [CheckpointError] * 3
    assert len({str(found) for found in raised}) == 1
    assert f"rank {culprit}: " in str(raised[0])
    assert reason in str(raised[0])
    assert raised[culprit].__cause__ is error
    assert load_text(path) == FILES
    assert hidden(tmp_path) == []


def test_ranks_need_a_common_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = str(tmp_path / "a"), Path.is_dir

    def save(world: Comm) -> None:
        write_checkpoint(path, lambda directory: None, world, kind="text")

    monkeypatch.setattr(Path, "is_dir", lambda self: ".tmp-" not in self.name and real(self))
    raised = on_ranks(2, save)
    assert all("one file system" in str(error) for error in raised)


# ------------------------------------------------------------- killed saves

CALLS = ("fsync", "mkdir", "rename", "rmdir", "unlink")


@pytest.mark.parametrize("replace", [False, True])
def test_a_save_killed_at_any_point_loses_nothing(tmp_path: Path, replace: bool) -> None:
    old = {"weights": "old", "only_old": "x"}
    new = {"weights": "new", "folder__only_new": "y"}
    seen = set()
    for point in count(1):
        path = tmp_path / str(point) / "a"
        path.parent.mkdir()
        if replace:
            save_text(path, **old)

        def save(path: Path = path, point: int = point) -> None:
            with killed_at(point, os, CALLS):
                save_text(path, **new)

        code = in_child(save)
        try:
            found = load_text(path)
        except CheckpointNotFound:
            found = {}
        assert found in ((old, new) if replace else ({}, new))
        seen.add(found.get("weights"))
        save_text(path, weights="next")
        assert load_text(path) == {"weights": "next"}
        assert hidden(path.parent) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert point > 8
    assert seen == {"old" if replace else None, "new"}


def test_old_checkpoint_survives_empty_directory(tmp_path: Path) -> None:
    save_text(tmp_path / "a", **FILES)
    (tmp_path / "a").rename(tmp_path / ".a.core-rl-old")
    (tmp_path / "a").mkdir()
    assert load_text(tmp_path / "a") == FILES

    with pytest.raises(CheckpointError, match=": RuntimeError: no"):
        write_checkpoint(str(tmp_path / "a"), _fail, Comm(), kind="text")
    assert load_text(tmp_path / "a") == FILES
    assert (tmp_path / "a" / "weights").is_file()  # back in its place, also for programs that know no better
    assert hidden(tmp_path) == []


def _fail(directory: Path) -> None:
    raise RuntimeError("no")


def test_failed_rename_restores_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_text(tmp_path / "a", **FILES)
    rename = Path.rename

    def fail_into_place(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_text(tmp_path / "a", weights="new")
    assert load_text(tmp_path / "a") == FILES
    assert hidden(tmp_path) == []


def test_save_in_progress_keeps_its_directory(tmp_path: Path) -> None:
    busy, left = (tmp_path / f".a.tmp-{digit * 32}" for digit in "01")
    busy.mkdir()
    left.mkdir()
    other = tmp_path / ".a.tmp-mine"
    other.mkdir()
    descriptor = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        save_text(tmp_path / "a", **FILES)
        assert sorted(hidden(tmp_path)) == sorted([busy.name, other.name])
    finally:
        os.close(descriptor)
    save_text(tmp_path / "a", **FILES)
    assert hidden(tmp_path) == [other.name]


def test_unlockable_directories_are_removed_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    fresh, old = (tmp_path / f".a.tmp-{digit * 32}" for digit in "01")
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    save_text(tmp_path / "a", **FILES)
    assert hidden(tmp_path) == [fresh.name]


# ---------------------------------------------------------------- full disk


def _large_text(directory: Path) -> None:
    (directory / "large").write_text("x" * 200_000)


def _large_tensors(directory: Path) -> None:
    stream = [("small", torch.zeros(10)), ("large", torch.zeros(100_000))]
    write_tensors(directory, "model", iter(stream), writes=True, max_file_bytes=1000)


def _many_files(directory: Path) -> None:
    for number in range(2000):  # each is small, and the manifest is large
        (directory / f"file-{number}").write_text("x")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_large_text, "File too large"),
        (_large_tensors, "model-00002.safetensors"),
        (_many_files, "File too large"),
    ],
)
def test_full_disk_raises_clear_error(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    path = tmp_path / "a"
    save_text(path, **FILES)

    def save() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(str(path), write, Comm(), kind="text")
        assert "too large" in str(caught.value)
        assert name in str(caught.value)
        assert "untouched" in str(caught.value)

    assert in_child(save) == 0
    assert load_text(path) == FILES
    assert hidden(tmp_path) == []


# --------------------------------------------------------------- bad places


def test_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    for name in ("data", "site"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years")
    (tmp_path / "site" / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "file").write_text("a file")
    for name in ("data", "site", "file"):
        with pytest.raises(CheckpointError, match="choose another path"):
            save_text(tmp_path / name, **FILES)
    with pytest.raises(CheckpointError, match="name a directory"):
        save_text("/", **FILES)
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years"


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_text(tmp_path / "a", **FILES)
    assert load_text(tmp_path / "a") == FILES


def test_each_rank_hashes_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is written and when it is read: one rank alone would take so many times as long."""
    path, hashed = str(tmp_path / "a"), list[tuple[str, ...]]()
    for name in ("records_of", "find_damage"):
        original = getattr(directory_module, name)

        def noted(directory: Path, files: Any, *rest: Any, original: Any = original) -> Any:
            hashed.append(tuple(files))
            return original(directory, files, *rest)

        monkeypatch.setattr(directory_module, name, noted)

    def save_and_open(world: Comm) -> None:
        def write(directory: Path) -> None:
            (directory / f"rank-{world.rank:05d}").write_text("x" * world.rank)

        write_checkpoint(path, write, world, kind="text")
        with open_checkpoint(path, world, kind="text"):
            pass

    assert on_ranks(3, save_and_open) == [None] * 3
    assert sorted(hashed) == [(f"rank-{rank:05d}",) for rank in (0, 0, 1, 1, 2, 2)]
    assert read_manifest(tmp_path / "a").files["rank-00002"].bytes == 2


@pytest.mark.parametrize("value", [{"when": object()}, {"deep": [{1: "one"}]}])
def test_non_json_state_is_refused(tmp_path: Path, value: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="the state of the checkpoint"):
        write_checkpoint(str(tmp_path / "a"), lambda directory: None, Comm(), kind="text", state=value)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["weights", "folder/deep/notes", "manifest.json"])
def test_damage_is_refused_with_the_files_name(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    save_text(tmp_path / "a", **FILES)
    damage(tmp_path / "a" / name)

    def load(world: Comm) -> None:
        with open_checkpoint(str(tmp_path / "a"), world, kind="text"):
            raise AssertionError("a damaged checkpoint was opened")

    raised = on_ranks(2, load)
    assert [type(error) for error in raised] == [CheckpointDamaged] * 2
    assert name in str(raised[0])


def test_every_damaged_file_is_listed(tmp_path: Path) -> None:
    save_text(tmp_path / "a", **FILES)
    (tmp_path / "a" / "weights").write_text("012")
    (tmp_path / "a" / "empty").unlink()
    with pytest.raises(CheckpointDamaged, match=r"(?s)empty: missing.*weights: 3 bytes instead of 10"):
        load_text(tmp_path / "a")


def test_without_digests_sizes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_checkpoint(str(path), write_two, Comm(), kind="text")
    (path / "one").write_text("eno")
    with pytest.raises(CheckpointDamaged, match="one: its contents changed"):
        open_text(path, digests=True)
    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", None)
        open_text(path, digests=False)
    (path / "one").write_text("on")
    (path / "two").unlink()
    with pytest.raises(CheckpointDamaged, match=r"(?s)one: 2 bytes instead of 3.*two: missing"):
        open_text(path, digests=False)


def write_two(directory: Path) -> None:
    for name in ("one", "two"):
        (directory / name).write_text(name)


def open_text(path: Path, digests: bool) -> None:
    with open_checkpoint(str(path), Comm(), kind="text", digests=digests):
        pass


def test_no_flipped_bit_of_a_manifest_goes_unseen(tmp_path: Path) -> None:
    save_text(tmp_path / "a", weights="x")
    text = (tmp_path / "a" / "manifest.json").read_bytes()
    for position in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[position] ^= 1 << bit
            with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
                parse_manifest(bytes(changed), "here")


def test_a_manifest_cannot_point_outside() -> None:
    record = FileRecord(bytes=1, sha256="")
    for name in ("../weights", "/etc/passwd"):
        text = Manifest(kind="text", state={}, files={name: record}).to_bytes()
        with pytest.raises(CheckpointDamaged, match="lies outside"):
            parse_manifest(text, "here")


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir])
def test_nothing_at_a_place_is_not_found(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a")
    with pytest.raises(CheckpointNotFound, match="cannot load"):
        load_text(tmp_path / "a")


def test_different_kind_is_refused(tmp_path: Path) -> None:
    save_text(tmp_path / "a", **FILES)
    with (
        pytest.raises(CheckpointMismatch, match="kind 'text', not 'hf'"),
        open_checkpoint(str(tmp_path / "a"), Comm(), kind="hf"),
    ):
        pass


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_text(tmp_path / "a", **FILES)
    monkeypatch.setattr("core_rl.checkpoint.manifest.FORMAT", 0)
    with pytest.raises(CheckpointMismatch, match="Upgrade core-rl"):
        load_text(tmp_path / "a")


def test_directory_without_manifest_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(str(tmp_path), Comm(), kind="hf", require_manifest=False) as directory:
        assert (directory / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointDamaged, match="manifest.json is missing"):
        load_text(tmp_path)


def test_nested_manifest_covers_nested_checkpoint(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "outer").write_text("o")
        save_text(directory / "engine", inner="i")

    write_checkpoint(str(tmp_path / "a"), write, Comm(), kind="text")
    listed = json.loads((tmp_path / "a" / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["engine/manifest.json", "outer"]
    (tmp_path / "a" / "engine" / "inner").write_text("j")
    with pytest.raises(CheckpointDamaged, match="engine/inner: its contents changed"):
        load_text(tmp_path / "a")
