"""The lines of a run on the terminal: phases before the first step, and the log file."""

from __future__ import annotations

import logging
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from core_rl.errors import ConfigError
from core_rl_trainer.logs.progress import TerminalLog, TrainingProgress, print_line


def _lines(path: Path) -> list[str]:
    """The lines of a log without their times."""
    return [re.sub(r"^\d{4}-\S+ \S+ ", "", line) for line in path.read_text(encoding="utf-8").splitlines()]


def _failing_run(path: Path, console: Console) -> None:
    log = TerminalLog()
    with log.attached():
        print_line(console, "data: [1 file]")  # before the directory of the run is there
        log.open(path)
        logging.getLogger("core_rl.somewhere").warning("low %s", "disk")
        raise ConfigError("steps = 0")


def test_log_has_terminal_lines_warnings_and_error(tmp_path: Path) -> None:
    path, shown = tmp_path / "run.log", StringIO()
    with pytest.raises(ConfigError):
        _failing_run(path, Console(file=shown))
    logging.getLogger("core_rl.somewhere").warning("after the run")
    assert _lines(path) == ["INFO data: [1 file]", "WARNING low disk", "ERROR ConfigError: steps = 0"]
    assert shown.getvalue() == "data: [1 file]\n"


def test_log_continues_and_leaves_no_handlers(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    for text in ("first", "second"):
        log = TerminalLog()
        with log.attached():
            log.open(tmp_path / "run.log")
            print_line(Console(file=StringIO()), text)
    assert _lines(tmp_path / "run.log") == ["INFO first", "INFO second"]
    assert logging.getLogger().handlers == before


def test_warnings_reach_stderr_once_without_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with TerminalLog().attached():
        logging.getLogger("core_rl.somewhere").warning("low disk")
    assert capsys.readouterr().err == "low disk\n"


def test_unwritable_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*missing/run.log: No such file"):
        TerminalLog().open(tmp_path / "missing" / "run.log")


@pytest.mark.parametrize("terminal", [True, False])
def test_phases_have_names_and_times(terminal: bool) -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120)
    with TrainingProgress(console, total=4, done=0) as progress:
        with progress.phase("building engines"):
            progress.refresh()
        with progress.phase("first evaluation"):
            pass
        progress.begin_steps()
    assert "building engines" in shown.getvalue()
    assert re.search(r"ready after \d+\.\d s", shown.getvalue())
    assert ("first evaluation …" in shown.getvalue()) is not terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("total", "done", "steps"),
    [
        (4, 0, [1, 2, 3, 4]),
        (35, 0, [*range(1, 11), *range(12, 35, 3), 35]),
        (1000, 0, [*range(1, 11), *range(100, 1001, 100)]),
        (1000, 250, [*range(251, 261), *range(300, 1001, 100)]),
    ],
)
def test_first_steps_each_have_a_line(terminal: bool, total: int, done: int, steps: list[int]) -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120)
    with TrainingProgress(console, total=total, done=done) as progress:
        for step in range(done + 1, total + 1):
            progress.show(step, {"loss": 0.5, "tokens_per_s": 7.0})
    assert [int(number) for number in re.findall(rf"step (\d+)/{total}  loss", shown.getvalue())] == steps
