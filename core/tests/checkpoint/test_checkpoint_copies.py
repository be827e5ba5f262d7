"""Copies of run checkpoints at a URL: complete ones alone count, and a run's directory can be made from them."""

from __future__ import annotations

import shutil
import signal
from itertools import count
from pathlib import Path

import pytest
from checkpoint_support import in_child, killed_at, load_text, save_text
from object_store import PROTOCOL, ObjectStore

from core_rl.checkpoint.copies import CheckpointCopies
from core_rl.checkpoint.run import RunCheckpoints
from core_rl.errors import CheckpointDamaged, CheckpointError, ConfigError, MissingPackage


def save(runs: RunCheckpoints, step: int, text: str = "") -> Path:
    return runs.save(
        step, {"engine": lambda directory: save_text(directory, weights=text or f"at {step}")}, {"step": step}
    )


def copies_in(tmp_path: Path, keep: int = 2) -> CheckpointCopies:
    return CheckpointCopies(f"{PROTOCOL}://{tmp_path}/store/run", keep)


def check(runs: RunCheckpoints, step: int, text: str = "") -> None:
    found = runs.latest()
    assert found is not None
    assert found.step == step
    assert found.state == {"step": step}
    assert load_text(found.part("engine")) == {"weights": text or f"at {step}"}


def test_newest_copies_restore_a_directory(tmp_path: Path) -> None:
    copies, runs = copies_in(tmp_path), RunCheckpoints(tmp_path / "a", keep=1)
    assert copies.steps() == []
    copies.download(runs)
    assert runs.steps() == []
    for step in (9, 10, 100):
        copies.upload(step, save(runs, step))
    assert copies.steps() == [10, 100]
    other = RunCheckpoints(tmp_path / "b", keep=1)
    copies.download(other)
    check(other, 100)
    shutil.rmtree(tmp_path / "store")
    copies.download(other)  # nothing newer
    check(other, 100)


def test_the_same_step_may_be_copied_again(tmp_path: Path) -> None:
    copies, runs = copies_in(tmp_path), RunCheckpoints(tmp_path / "a", keep=1)
    copies.upload(3, save(runs, 3))
    copies.upload(3, save(runs, 3, "again"))
    other = RunCheckpoints(tmp_path / "b", keep=1)
    copies.download(other)
    check(other, 3, "again")
    copies.clear()
    assert copies.steps() == []


@pytest.mark.parametrize("step", [2, 3])
def test_killed_copy_is_complete_or_absent(tmp_path: Path, step: int) -> None:
    for point in count(1):
        here = tmp_path / str(point)
        keep = 4 - step  # a step that is copied again does not count until it is complete
        copies, runs = copies_in(here, keep), RunCheckpoints(here / "a", keep=1)
        for earlier in (1, 2):
            copies.upload(earlier, save(runs, earlier))
        path = save(runs, step, "new")

        def copy(copies: CheckpointCopies = copies, path: Path = path, point: int = point) -> None:
            with killed_at(point, ObjectStore, ("put_file", "rm")):
                copies.upload(step, path)

        code = in_child(copy)
        other = RunCheckpoints(here / "b", keep=1)
        copies.download(other)
        found = other.latest()
        assert found is not None
        assert (found.step, load_text(found.part("engine"))["weights"]) in (
            (step - 1, f"at {step - 1}"),
            (2, "at 2"),
            (step, "new"),
        )
        copies.upload(4, save(runs, 4))
        assert copies.steps()[-1] == 4 and len(copies.steps()) <= keep
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert point > 5


def test_failed_upload_names_url_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, runs = copies_in(tmp_path), RunCheckpoints(tmp_path / "a", keep=2)
    copies.upload(1, save(runs, 1))
    path = save(runs, 2)

    def fail(*_: object) -> None:
        raise OSError("the connection was reset")

    with monkeypatch.context() as patches:
        patches.setattr(ObjectStore, "put_file", fail)
        with pytest.raises(CheckpointError) as caught:
            copies.upload(2, path)
    assert f"to {copies.url!r}; it is in {path}" in str(caught.value)
    assert "the connection was reset" in str(caught.value)
    assert copies.steps() == [1]
    copies.upload(2, path)
    assert copies.steps() == [1, 2]


def test_a_damaged_copy_is_refused(tmp_path: Path) -> None:
    copies, runs = copies_in(tmp_path), RunCheckpoints(tmp_path / "a", keep=2)
    copies.upload(1, save(runs, 1))
    (tmp_path / "store" / "run" / "step-00000001" / "engine" / "weights").write_text("at 2")
    other = RunCheckpoints(tmp_path / "b", keep=1)
    with pytest.raises(CheckpointDamaged, match=r"step 1 in 'objects:.*engine/weights: its contents changed"):
        copies.download(other)
    assert other.steps() == []


def test_unopenable_url_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="not an fsspec URL"):
        CheckpointCopies("runs/a", keep=1)
    with pytest.raises(MissingPackage, match=r"s3://bucket/run.*s3fs"):
        CheckpointCopies("s3://bucket/run", keep=1)
