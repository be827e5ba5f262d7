"""The command ``core-rl runs``: states of runs, commands that continue them, and two runs compared."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console

from core_rl.cli import main
from core_rl_trainer import EvaluationEnd, Event, StopRun, train


def stop(event: Event) -> None:
    if isinstance(event, EvaluationEnd) and event.step == 2:
        raise StopRun("good <enough>")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, a run stopped by a callback, and a copy of it as an interruption leaves it."""
    directory = tmp_path_factory.mktemp("root")
    start, console = support.make_start(directory / "start"), Console(file=StringIO())
    values = support.supervised_values(start, directory / "runs" / "a", "sft", steps=1)
    train(values, console=console)
    new = {"output_dir": directory / "runs" / "b", "steps": 4, "eval_every": 2, "seed": 1}
    train(values | new, callbacks=[stop], console=console)
    shutil.copytree(directory / "runs" / "b", directory / "runs" / "below" / "c")
    status = directory / "runs" / "below" / "c" / "status.json"
    status.write_text(status.read_text().replace("stopped", "running"))
    (directory / "runs" / "below" / "c" / "result.json").unlink()
    return directory


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["runs", *words])
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    code, out, _ = command(capsys, *words, "--json")
    assert code == 0
    return {Path(run["path"]).name: run for run in json.loads(out)}


def test_runs_have_state_progress_and_command(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = listed(capsys, str(root))
    assert {name: (run["state"], run["step"], run["steps"]) for name, run in runs.items()} == {
        "a": ("complete", 1, 1),
        "b": ("stopped", 2, 4),
        "c": ("interrupted", 2, 4),
    }
    assert runs["b"]["reason"] == "callback 'stop': good <enough>" and runs["c"]["reason"] == ""
    assert runs["a"]["metric"] == "loss" and runs["a"]["value"] > 0
    assert {run["evaluation"] for run in runs.values()} == {"eval_loss"} and runs["a"]["evaluation_value"] > 0
    assert all(run["started"] <= run["updated"] for run in runs.values())
    assert runs["a"]["command"] == f"core-rl train {root}/runs/a/recipe.yaml steps=2"
    assert runs["c"]["command"] == f"core-rl train {root}/runs/below/c/recipe.yaml"
    directory = Path.cwd()
    monkeypatch.chdir(root)  # relative paths of a recipe start elsewhere
    assert listed(capsys)["b"]["command"] == f"cd {directory} && core-rl train {root}/runs/b/recipe.yaml"
    code, out, _ = command(capsys, "runs")
    assert code == 0 and "runs/b stopped: callback 'stop': good <enough>\n" in out
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 80


def test_locked_run_is_running(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (root / "runs" / "b" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = listed(capsys, str(root / "runs" / "b"))["b"]
    assert (run["state"], run["command"]) == ("running", None)


def test_diff_prints_fields_and_metrics(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diff", str(root / "runs" / "a"), str(root / "runs" / "b")]
    code, out, _ = command(capsys, *words, "--json")
    values = json.loads(out)
    assert code == 0
    assert values["fields"] == {"eval_every": [3, 2], "seed": [0, 1], "steps": [1, 4]}
    metrics = values["metrics"]
    assert {"loss", "eval_loss"} <= metrics.keys() and not {"step", "version"} & metrics.keys()
    code, out, _ = command(capsys, *words)
    rows = {row.split()[0]: row.split()[1:] for row in out.splitlines() if len(row.split()) == 3}
    assert code == 0 and rows["seed"] == ["0", "1"]
    assert rows["loss"] == [f"{value:.4g}" for value in metrics["loss"]]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none"], 2, "none: there is no such directory"),
        (["diff", "start", "runs/a"], 2, "start holds no run: it has no recipe.yaml"),
        (["diff", "runs/a"], 2, "write 'core-rl runs DIR', or 'core-rl runs diff A B'"),
        (["runs/a", "runs/b"], 2, "write 'core-rl runs DIR', or 'core-rl runs diff A B'"),
        (["start"], 0, "There are no runs below start"),
    ],
)
def test_bad_input(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(root)
    status, out, error = command(capsys, *words)
    assert status == code and message in out + error


def test_damaged_run_hides_no_run(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "a" / "recipe.yaml").write_text("steps: [")
    code, out, error = command(capsys, str(tmp_path), "--json")
    assert code == 0 and len(json.loads(out)) == 2
    assert error.count("\n") == 1 and "runs/a: a file of the run is damaged" in error


def test_the_list_loads_without_torch() -> None:
    code = "import sys, core_rl_trainer.logs.listing, core_rl_trainer.cli.init; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
