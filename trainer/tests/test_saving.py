"""Run checkpoints that are written while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core_rl.checkpoint.run import RunCheckpoints
from core_rl.errors import CheckpointError, GroupError
from core_rl_trainer.loop.saving import RunSaver


class Engine:
    """Its part is complete when somebody waits for it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._parts: list[Path] = []

    def begin(self, directory: Path) -> None:
        self._parts.append(directory)
        self._temporary(directory).mkdir()

    def complete(self) -> None:
        while self._parts:
            directory = self._parts.pop()
            self._temporary(directory).rmdir()
            (directory / "weights").write_text("1.0")

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.complete()

    def _temporary(self, directory: Path) -> Path:
        return directory.with_name(f".{directory.name}.tmp-{'0' * 32}")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def saved() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def saver(tmp_path: Path, engine: Engine, saved: list[tuple[int, str]]) -> RunSaver:
    checkpoints = RunCheckpoints(tmp_path, keep=5)
    return RunSaver(checkpoints, engine.wait, lambda step, path: saved.append((step, path.name)))


def test_a_checkpoint_is_in_place_when_nobody_writes_any_more(
    saver: RunSaver, engine: Engine, saved: list[Any]
) -> None:
    saver.begin(1, {"model": engine.begin}, {})
    saver.finish_if_written()
    assert saved == []
    engine.complete()
    saver.finish_if_written()
    saver.finish()
    assert saved == [(1, "step-00000001")]


def test_the_next_save_and_the_end_wait_for_the_one_before(
    saver: RunSaver, engine: Engine, saved: list[Any]
) -> None:
    with saver.completed():
        saver.begin(1, {"model": engine.begin}, {})
        saver.begin(2, {"model": engine.begin}, {})
        assert [step for step, _ in saved] == [1]
    assert [step for step, _ in saved] == [1, 2]


ERRORS: list[Callable[[], BaseException]] = [lambda: GroupError("rank 1 is gone"), KeyboardInterrupt]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
def test_a_run_that_fails_keeps_the_checkpoint_on_its_way(
    saver: RunSaver, engine: Engine, saved: list[Any], error: Callable[[], BaseException]
) -> None:
    saver.begin(1, {"model": engine.begin}, {})
    with pytest.raises((GroupError, KeyboardInterrupt)), saver.completed():
        raise error()
    assert [step for step, _ in saved] == [1]


def test_what_the_background_could_not_write_is_an_error_and_hides_no_other(
    saver: RunSaver, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = CheckpointError("No space left on device")
    saver.begin(1, {"model": engine.begin}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        saver.finish()
    saver.begin(1, {"model": engine.begin}, {})
    with pytest.raises(GroupError), saver.completed():
        raise GroupError("rank 1 is gone")
    assert "the checkpoint of step 1 was not completed: No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
