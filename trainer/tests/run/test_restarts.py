"""``cluster.restarts``: runs that lose ranks continue from their last checkpoint, as if they had not."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console

from core_rl.errors import RankDied
from core_rl.launch.group import EngineGroup
from core_rl_trainer import train
from core_rl_trainer.callbacks import CheckpointSaved, Event, StepEnd
from core_rl_trainer.errors import CallbackError
from core_rl_trainer.run import engines

Groups = list[EngineGroup]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """All groups that a run starts, in their order."""
    opened: Groups = []

    class Recorded(EngineGroup):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            opened.append(self)

    monkeypatch.setattr(engines, "EngineGroup", Recorded)
    return opened


def kill_after(
    step: int, groups: Groups, times: int = 1, kind: type[Event] = StepEnd
) -> Callable[[Event], None]:
    """A callback that kills the last rank of the newest group after ``step``, so many times."""
    left = [times]

    def callback(event: Event) -> None:
        if isinstance(event, kind) and event.step == step and left[0]:
            left[0] -= 1
            os.kill(groups[-1].pids[-1], signal.SIGKILL)

    return callback


def run(values: dict[str, Any], *callbacks: Callable[[Event], None]) -> str:
    """Train; returns the printed text."""
    console = Console(file=io.StringIO(), width=200)
    train(values, callbacks=callbacks, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def unbroken(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "out"
    run(support.recipe_values(start, output))
    return output


RESTART = {"restarts": 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("step", "kind", "start_from"),
    [(2, CheckpointSaved, 2), (3, StepEnd, 2), (1, StepEnd, 0)],
    ids=["at a checkpoint", "after a checkpoint", "before the first"],
)
def test_a_killed_rank_changes_no_metric(
    unbroken: Path,
    start: Path,
    tmp_path: Path,
    groups: Groups,
    caplog: pytest.LogCaptureFixture,
    step: int,
    kind: type[Event],
    start_from: int,
) -> None:
    caplog.set_level("INFO", logger="core_rl_trainer")
    output = tmp_path / "out"
    printed = run(support.recipe_values(start, output, cluster=RESTART), kill_after(step, groups, kind=kind))
    assert support.curve(output) == support.curve(unbroken)
    weights = [path / "model" / "model.safetensors" for path in (output, unbroken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    where = f"the checkpoint of step {start_from}" if start_from else "the beginning"
    message = f"restart 1 of 1, from {where}, on this machine: rank 0 was killed by SIGKILL"
    assert message in printed and message in caplog.text
    page = (output / "index.html").read_text()
    assert f"from step {start_from}, on 1 machine: rank 0 was killed by SIGKILL" in page
    assert ">complete<" in page
    rows = [json.loads(line) for line in (output / "restarts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [start_from]


@pytest.mark.nightly
def test_a_supervised_run_restarts_too(start: Path, tmp_path: Path, groups: Groups) -> None:
    outputs = [tmp_path / name for name in ("unbroken", "killed")]
    run(support.supervised_values(start, outputs[0], "sft"))
    run(support.supervised_values(start, outputs[1], "sft", cluster=RESTART), kill_after(3, groups))
    assert support.curve(outputs[0]) == support.curve(outputs[1])


@pytest.mark.nightly
def test_each_restart_counts(start: Path, tmp_path: Path, groups: Groups) -> None:
    values = support.supervised_values(start, tmp_path / "out", "sft", cluster={"restarts": 2})
    with pytest.raises(RankDied) as caught:
        run(values, kill_after(3, groups, times=3))
    used, hint = caught.value.__notes__
    assert used == "cluster.restarts = 2, and all of them were used"
    assert hint.startswith("the same command resumes from the checkpoint of step ")
    assert len((tmp_path / "out" / "restarts.jsonl").read_text().splitlines()) == 2
    assert "RankDied" in (tmp_path / "out" / "index.html").read_text()
    assert len(groups) == 3


def test_an_error_of_a_user_restarts_nothing(start: Path, tmp_path: Path, groups: Groups) -> None:
    def callback(event: Event) -> None:
        raise ValueError("a bug")

    values = support.supervised_values(start, tmp_path / "out", "sft", cluster={"restarts": 2})
    with pytest.raises(CallbackError, match="a bug"):
        run(values, callback)
    assert len(groups) == 1 and not (tmp_path / "out" / "restarts.jsonl").exists()


def test_without_restarts_a_killed_rank_ends_the_run(start: Path, tmp_path: Path, groups: Groups) -> None:
    with pytest.raises(RankDied) as caught:
        run(support.supervised_values(start, tmp_path / "out", "sft"), kill_after(1, groups))
    assert caught.value.__notes__ == [
        "there is no checkpoint yet, and the same command starts from the beginning"
    ]
    assert caught.value.__notes__[0] in (tmp_path / "out" / "run.log").read_text()
    assert len(groups) == 1
