"""Checkpoints under fsspec URLs: the manifest comes last and is the commit marker."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import fsspec
import pytest
from checkpoint_support import DAMAGE, in_child, killed_at, load_text, on_ranks, save_text
from fsspec.implementations.local import LocalFileSystem

from core_rl.checkpoint.directory import open_checkpoint, write_checkpoint
from core_rl.checkpoint.manifest import parse_manifest
from core_rl.checkpoint.remote import RemoteStorage
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound

FILES = {"weights": "0123456789", "folder__deep__notes": "abcdef", "empty": ""}


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/store/a" if request.param == "file" else "memory://store/a"
    fsspec.filesystem("memory").store.clear()


def test_saved_url_is_read_back_and_replaced(url: str) -> None:
    with pytest.raises(CheckpointNotFound):
        load_text(url)
    save_text(url, **FILES)
    assert load_text(url) == FILES
    assert parse_manifest(RemoteStorage(url).manifest_bytes() or b"", url).state == {"files": sorted(FILES)}
    save_text(url, weights="new", other="o")
    assert load_text(url) == {"weights": "new", "other": "o"}
    files, root = fsspec.core.url_to_fs(url)
    assert sorted(name.removeprefix(root) for name in files.find(root)) == [
        "/manifest.json",
        "/other",
        "/weights",
    ]


def test_all_ranks_write_and_read(url: str) -> None:
    def save(world: Comm) -> dict[str, str]:
        def write(directory: Path) -> None:
            (directory / f"rank{world.rank}").write_text("x")

        write_checkpoint(url, write, world, kind="text")
        with open_checkpoint(url, world, kind="text") as directory:
            return {file.name: file.read_text() for file in directory.glob("rank*")}

    assert on_ranks(2, save) == [{"rank0": "x", "rank1": "x"}] * 2


def test_the_download_is_removed(url: str) -> None:
    save_text(url, **FILES)
    with open_checkpoint(url, Comm(), kind="text") as directory:
        save_text(f"{url}-2", **FILES)  # removes what killed processes have left
        assert directory.is_dir()
    assert not directory.exists()


@pytest.mark.parametrize("replace", [False, True])
def test_an_upload_killed_at_any_point_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    old = {"weights": "old", "only_old": "x"}
    new = {"weights": "new", "folder__only_new": "y"}
    for point in count(1):
        url = f"file://{tmp_path}/{point}"
        if replace:
            save_text(url, **old)

        def save(url: str = url, point: int = point) -> None:
            with killed_at(point, LocalFileSystem, ("put_file", "cp_file", "pipe_file", "rm", "makedirs")):
                save_text(url, **new)

        code = in_child(save)
        assert len(list(scratch.iterdir())) == (code != 0)
        try:
            found = load_text(url)
        except (CheckpointNotFound, CheckpointDamaged):  # nothing complete: refused either way
            found = {}
        assert found in ((old, new) if replace else ({}, new))
        save_text(url, weights="next")
        assert load_text(url) == {"weights": "next"}
        assert not list(scratch.iterdir())
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == new or not replace
    assert point > 5


def test_failed_upload_keeps_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/a"
    save_text(url, **FILES)
    put = LocalFileSystem.put_file

    def fail(self: LocalFileSystem, source: str, target: str) -> None:
        if target.endswith("weights"):
            raise OSError("the connection was reset")
        put(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "put_file", fail)
    with pytest.raises(CheckpointError, match="the connection was reset"):
        save_text(url, weights="new")
    assert load_text(url) == FILES


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["weights", "manifest.json"])
def test_damage_is_refused_with_the_files_name(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    save_text(f"file://{tmp_path}/a", **FILES)
    damage(tmp_path / "a" / name)
    with pytest.raises(CheckpointDamaged, match=name):
        load_text(f"file://{tmp_path}/a")


def test_foreign_url_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="choose another path"):
        save_text(f"file://{tmp_path}", **FILES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_url_without_manifest_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(f"file://{tmp_path}", Comm(), kind="hf", require_manifest=False) as directory:
        assert (directory / "config.json").read_text() == "{}"


def test_an_unknown_protocol_is_a_clear_error() -> None:
    for call in (load_text, save_text):
        with pytest.raises(CheckpointError, match="nosuch"):
            call("nosuch://bucket/a")
