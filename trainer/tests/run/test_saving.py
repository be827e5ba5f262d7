"""Run checkpoints that are written while the run continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core_rl.checkpoint.run import RunCheckpoints
from core_rl.errors import (
    CheckpointError,
    ConfigError,
    CoreRLError,
    GroupError,
    OutOfDeviceMemory,
    RankDied,
    RankFailed,
    RolloutError,
)
from core_rl_trainer.errors import CallbackError, StepError, StoppedBySignal
from core_rl_trainer.run.run_directory import failures_with_hint, resume_hint
from core_rl_trainer.run.saving import RunSaver


class Engine:
    """A part that is complete once it is waited for."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.interrupts: dict[str, int] = {}
        """Ctrl-C during a method, as often."""
        self._parts: list[Path] = []

    def begin(self, directory: Path) -> None:
        self.interrupt("begin")
        self._parts.append(directory)
        self._temporary(directory).mkdir()

    def complete(self) -> None:
        while self._parts:
            directory = self._parts.pop()
            self._temporary(directory).rmdir()
            (directory / "weights").write_text("1.0")

    def wait(self) -> None:
        self.interrupt("wait")
        if self.error is not None:
            raise self.error
        self.complete()

    def interrupt(self, method: str) -> None:
        for _ in range(self.interrupts.get(method, 0)):
            os.kill(os.getpid(), signal.SIGINT)

    def _temporary(self, directory: Path) -> Path:
        return directory.with_name(f".{directory.name}.tmp-{'0' * 32}")


@pytest.fixture(autouse=True)
def python_interrupts() -> Iterator[None]:
    """Python's handler of Ctrl-C, which a shell turns off for commands in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def test_checkpoint_is_complete_after_background_write(
    saver: RunSaver, engine: Engine, saved: list[Any]
) -> None:
    saver.begin(1, {"model": engine.begin}, {})
    saver.finish_if_written()
    assert saved == []
    engine.complete()
    saver.finish_if_written()
    saver.finish()
    assert saved == [(1, "step-00000001")]


def test_saves_wait_for_previous_save(saver: RunSaver, engine: Engine, saved: list[Any]) -> None:
    with saver.completed():
        saver.begin(1, {"model": engine.begin}, {})
        saver.begin(2, {"model": engine.begin}, {})
        assert [step for step, _ in saved] == [1]
    assert [step for step, _ in saved] == [1, 2]


ERRORS: list[Callable[[], BaseException]] = [lambda: GroupError("rank 1 is gone"), KeyboardInterrupt]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
def test_failed_run_keeps_pending_checkpoint(
    saver: RunSaver, engine: Engine, saved: list[Any], error: Callable[[], BaseException]
) -> None:
    saver.begin(1, {"model": engine.begin}, {})
    with pytest.raises((GroupError, KeyboardInterrupt)), saver.completed():
        raise error()
    assert [step for step, _ in saved] == [1]


def test_background_write_error_is_raised(
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


def _two_steps(saver: RunSaver, engine: Engine) -> None:
    with saver.completed():
        saver.begin(1, {"model": engine.begin}, {})
        engine.interrupt("step")  # noted; the step continues to its end
        saver.finish_if_written()
        saver.finish()


@pytest.mark.parametrize(
    ("interrupts", "places"),
    [
        ({"begin": 1}, [1]),
        ({"wait": 1}, [1]),
        ({"step": 1}, [1]),
        ({"begin": 2}, []),
        ({"wait": 2}, []),
        ({"step": 1, "wait": 1}, [1]),
    ],
)
def test_first_interrupt_waits_for_the_checkpoint(
    saver: RunSaver, engine: Engine, saved: list[Any], interrupts: dict[str, int], places: list[int]
) -> None:
    engine.interrupts = interrupts
    with pytest.raises(KeyboardInterrupt):
        _two_steps(saver, engine)
    assert [step for step, _ in saved] == places
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_is_at_once_without_unwritten_checkpoint(
    saver: RunSaver, engine: Engine, saved: list[Any]
) -> None:
    saver.begin(1, {"model": engine.begin}, {})
    engine.complete()
    engine.error = GroupError("the group has ended")  # by an interrupt inside a call
    with pytest.raises(KeyboardInterrupt), saver.completed():
        os.kill(os.getpid(), signal.SIGINT)
    assert [step for step, _ in saved] == [1]


def test_failed_parts_are_not_put_in_place(saver: RunSaver, engine: Engine, tmp_path: Path) -> None:
    engine.error = RankFailed("rank 0: ValueError")
    saver.begin(1, {"model": engine.begin}, {})
    engine.complete()
    with pytest.raises(RankFailed):
        saver.finish()
    assert list(tmp_path.iterdir()) == []


def test_hint_names_an_existing_checkpoint(engine: Engine, tmp_path: Path) -> None:
    assert "starts from the beginning" in resume_hint(tmp_path / "none", fresh=False)
    saver = RunSaver(RunCheckpoints(tmp_path / "checkpoints", keep=1), engine.wait, lambda step, path: None)
    saver.begin(3, {"model": engine.begin}, {})
    assert "no checkpoint yet" in resume_hint(tmp_path, fresh=False)
    saver.finish()
    hint = "the same command resumes from the checkpoint of step 3"
    assert resume_hint(tmp_path, fresh=False) == hint
    assert resume_hint(tmp_path, fresh=True) == hint.replace("command", "command without fresh=true")


@pytest.mark.parametrize(
    ("error", "has_hint"),
    [
        (RankDied("rank 0 was killed by SIGKILL"), True),
        (RolloutError("the server is lost"), True),
        (OutOfDeviceMemory("too few GiB"), True),
        (CallbackError("a bug"), True),
        (StepError("a row"), True),
        (ConfigError("a field"), False),
        (StoppedBySignal("the same command goes on"), False),
    ],
)
def test_failures_of_begun_runs_have_hints(tmp_path: Path, error: CoreRLError, has_hint: bool) -> None:
    with pytest.raises(type(error)) as caught, failures_with_hint(tmp_path, fresh=False):
        raise error
    assert getattr(caught.value, "__notes__", []) == [resume_hint(tmp_path, fresh=False)] * has_hint
