"""The checkpoint of a whole run: every part or none, the newest few, and a clear way on after damage."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import DAMAGE, hidden, in_child, killed_at, load_text, save_text

from core_rl.checkpoint import manifest
from core_rl.checkpoint.directory import LocalStorage
from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError

CALLS = ("fsync", "mkdir", "rename", "rmdir", "unlink")


def parts(text: str) -> dict[str, Callable[[Path], None]]:
    """An engine, which saves a checkpoint of its own, and a data loader, which writes a file."""
    return {
        "engine": lambda directory: save_text(directory, weights=text),
        "loader": lambda directory: (directory / "state.json").write_text(text) and None,
    }


def save(runs: RunCheckpoints, step: int) -> None:
    runs.save(step, parts(f"at {step}"), {"step": step, "reward": [0.5, 1.0]})


def check(found: RunCheckpoint | None, step: int) -> None:
    assert found is not None
    assert found.step == step
    assert found.state == {"step": step, "reward": [0.5, 1.0]}
    assert load_text(found.part("engine")) == {"weights": f"at {step}"}
    assert (found.part("loader") / "state.json").read_text() == f"at {step}"


def test_the_latest_is_the_newest_complete(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path / "runs", keep=2)
    assert runs.latest() is None
    for step in (9, 10, 100):
        save(runs, step)
        check(runs.latest(), step)
    assert [entry.name for entry in sorted((tmp_path / "runs").iterdir())] == [
        "step-00000010",
        "step-00000100",
    ]
    check(RunCheckpoints(tmp_path / "runs", keep=1).latest(), 100)
    check(runs.at(10), 10)
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 9; available steps: 10, 100"):
        runs.at(9)


@pytest.mark.parametrize("step", [None, 1])
def test_reading_outlives_removal_by_the_run(tmp_path: Path, step: int | None) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)
    with RunCheckpoints(tmp_path, keep=1).reading(step) as checkpoint:
        save(runs, 2)
        save(runs, 3)
        check(checkpoint, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("step", [None, 1])
def test_reading_takes_the_newest_after_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)
    linked = LocalStorage.linked

    def overtaken(place: LocalStorage) -> Any:
        if runs.steps() == [1]:
            save(runs, 2)
        return linked(place)

    monkeypatch.setattr(LocalStorage, "linked", overtaken)
    with ExitStack() as stack:
        if step is None:
            check(stack.enter_context(runs.reading(step)), 2)
        else:
            with pytest.raises(CheckpointNotFound, match="no checkpoint of step 1; available steps: 2"):
                stack.enter_context(runs.reading(step))


def test_reading_needs_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", target)

    runs = RunCheckpoints(tmp_path, keep=1)
    with runs.reading() as checkpoint:
        assert checkpoint is None
    save(runs, 1)
    monkeypatch.setattr(os, "link", refused)
    with runs.reading() as checkpoint:
        check(checkpoint, 1)


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 3)
    runs.save(3, parts("again"), {})
    found = runs.latest()
    assert found is not None
    assert load_text(found.part("engine")) == {"weights": "again"}


def test_earlier_step_is_refused(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=3)
    save(runs, 10)
    with pytest.raises(CheckpointError, match="already holds step 10, later than step 4"):
        save(runs, 4)
    check(runs.latest(), 10)


def test_failing_part_loses_nothing(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise CheckpointError("rank 1: model.safetensors: No space left on device")

    with pytest.raises(CheckpointError, match=r"step-00000002.*model\.safetensors: No space left on device"):
        runs.save(2, {"engine": fail}, {})
    check(runs.latest(), 1)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_save_killed_at_any_point_loses_nothing(tmp_path: Path, step: int) -> None:
    for point in count(1):
        runs = RunCheckpoints(tmp_path / str(point), keep=1)
        save(runs, 2)

        def save_and_die(runs: RunCheckpoints = runs, point: int = point) -> None:
            with killed_at(point, os, CALLS):
                runs.save(step, parts(f"at {step}"), {"step": step, "reward": [0.5, 1.0]})

        code = in_child(save_and_die)
        found = runs.latest()
        assert found is not None
        check(found, found.step)
        assert found.step in (2, step)
        save(runs, 4)
        check(runs.latest(), 4)
        assert [entry.name for entry in runs.root.iterdir()] == ["step-00000004"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found is not None
    assert found.step == step
    assert point > 20


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "loader/state.json", "engine/manifest.json"])
def test_damaged_newest_is_refused_with_remedy(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    runs = RunCheckpoints(tmp_path, keep=2)
    save(runs, 1)
    save(runs, 2)
    damage(tmp_path / "step-00000002" / name)
    with pytest.raises(CheckpointDamaged) as caught:
        runs.latest()
    assert name in str(caught.value)
    assert f"remove {tmp_path}/step-00000002 to go on from step 1" in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_opening_damaged_part_raises(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """What shows by its size is refused at once."""
    runs = RunCheckpoints(tmp_path, keep=2)
    save(runs, 1)
    damage(tmp_path / "step-00000001" / "engine" / "weights")
    with pytest.raises(CheckpointDamaged, match="weights: "):
        check(runs.latest(), 1)


def test_files_of_parts_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine that loads them: the checkpoint of a large model is hundreds of gigabytes."""
    runs = RunCheckpoints(tmp_path, keep=2)
    save(runs, 1)
    original, hashed = manifest._record, list[str]()

    def noted(file: Path) -> manifest.FileRecord:
        hashed.append(file.relative_to(tmp_path / "step-00000001").as_posix())
        return original(file)

    monkeypatch.setattr(manifest, "_record", noted)
    check(runs.latest(), 1)
    assert sorted(hashed) == ["engine/manifest.json", "engine/weights", "loader/state.json", "state.json"]


def test_a_checkpoint_appears_when_its_parts_are_complete(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)
    later: list[Path] = []

    def begin(directory: Path) -> None:
        later.extend([directory, directory.with_name(f".{directory.name}.tmp-{'0' * 32}")])
        later[-1].mkdir()

    state = {"step": 2, "reward": [0.5, 1.0]}
    pending = runs.begin(2, parts("at 2") | {"engine": begin}, state)
    assert not pending.is_written
    check(runs.latest(), 1)
    later[-1].rmdir()
    save_text(later[0], weights="at 2")
    assert pending.is_written
    pending.finish()
    check(runs.latest(), 2)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("written", [True, False])
def test_unwritten_part_is_refused(tmp_path: Path, written: bool) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)

    def begin(directory: Path) -> None:
        if not written:
            directory.with_name(f".{directory.name}.tmp-{'0' * 32}").mkdir()

    problem = "nothing was written of 'engine'" if written else "parts are still being written"
    with pytest.raises(CheckpointError, match=problem):
        runs.begin(2, {"engine": begin}, {}).finish()
    check(runs.latest(), 1)
    assert hidden(tmp_path) == []


def test_partial_and_foreign_directories_are_ignored(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)
    partial = tmp_path / f".step-00000002.tmp-{'0' * 32}"
    partial.mkdir()
    (tmp_path / "step-final").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    check(runs.latest(), 1)
    save(runs, 3)
    assert not partial.exists()
    assert (tmp_path / "step-final").is_dir()


def test_unremovable_old_checkpoint_does_not_stop_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)

    def busy(place: LocalStorage) -> None:
        raise OSError("device or resource busy")

    monkeypatch.setattr(LocalStorage, "remove", busy)
    save(runs, 2)
    check(runs.latest(), 2)
    assert "cannot remove the old checkpoint of step 1" in caplog.text


@pytest.mark.parametrize("state", [{"loader": object()}, {1: "one"}])
def test_non_json_run_state_is_refused(tmp_path: Path, state: dict[Any, Any]) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="the state of the run"):
        runs.save(1, {}, state)
    assert runs.latest() is None


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "state.json", "manifest.json"])
def test_a_part_needs_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a part"):
        RunCheckpoints(tmp_path, keep=1).save(1, {name: lambda directory: None}, {})


def test_missing_part_is_named(tmp_path: Path) -> None:
    runs = RunCheckpoints(tmp_path, keep=1)
    save(runs, 1)
    found = runs.latest()
    assert found is not None
    with pytest.raises(CheckpointNotFound, match="no part 'critic'"):
        found.part("critic")


@pytest.mark.parametrize(
    ("root", "keep", "problem"), [("s3://bucket/run", 1, "is a URL"), ("runs", 0, "keep = 0")]
)
def test_invalid_settings_are_refused(root: str, keep: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RunCheckpoints(root, keep=keep)
