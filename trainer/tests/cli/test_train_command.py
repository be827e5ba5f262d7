"""The command ``core-rl train``: arguments, output, exit codes, and the imports of the package."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_support as support

import core_rl_trainer
from core_rl import errors
from core_rl.cli import main
from core_rl_trainer.errors import NothingLearned, StepError, StoppedBySignal
from core_rl_trainer.run.signals import EndedBySignal


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | dict[str, float]) -> list[list[str]]:
    """Replace `train` by a function with this outcome; returns the overrides of its calls."""
    calls: list[list[str]] = []

    def load_recipe(path: Path, overrides: list[str]) -> SimpleNamespace:
        calls.append([str(path), *overrides])
        return SimpleNamespace(directory=Path("no-run"), engine="reference", fresh=False)

    def train(recipe: SimpleNamespace) -> dict[str, float]:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("core_rl_trainer.api.train_loaded", train)
    monkeypatch.setattr("core_rl_trainer.recipe.recipe.load_recipe", load_recipe)
    return calls


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=abc", "field 'optimizer.lr' = 'abc'"),
        ("foo=1", "unknown field 'foo' = 1"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl': there is no such file"),
        ("data.train=d/*.parquet", "patterns are not read: name the directory"),
        ("engine=fspd", "no installed engine is called 'fspd'"),
        ("engines.fsdp.layout.dp=two", "engine 'fsdp': field 'layout.dp' = 'two'"),
        ("model.path=nowhere", "nowhere': no such directory"),
    ],
)
def test_invalid_recipe_is_refused_without_torch(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}")
    values = {
        "engine": "fsdp",
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "data.jsonl"), "eval_fraction": 0.1},
        "steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    recipe = support.write_recipe(tmp_path / "r.yaml", values)
    main_and_torch = "try: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    program = f"import sys; from core_rl.cli import main\n{main_and_torch}"
    command = [sys.executable, "-c", program, "train", str(recipe), override]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert message in done.stderr and done.stdout.strip() == "False", done
    assert done.returncode == 2


def test_train_hands_on_the_recipe_and_the_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = stand_in(monkeypatch, {"reward": 0.5})
    assert run_command("train", "recipe.yaml", "engine=fsdp", "optimizer.lr=1e-5") == 0
    assert calls == [["recipe.yaml", "engine=fsdp", "optimizer.lr=1e-5"]]
    assert capsys.readouterr().out == ""


def test_train_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, {"reward": 0.5})
    assert run_command("train", "recipe.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"reward": 0.5}


def test_dry_run_prints_plan_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = support.make_start(tmp_path)
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    capsys.readouterr()  # what saving the model printed
    assert run_command("train", str(recipe), "seed=1", "--dry-run", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["recipe"]["seed"] == 1 and printed["recipe"]["optimizer"]["lr"] == 0.02
    assert [role["role"] for role in printed["plan"]["roles"]] == ["actor", "reference", "rollout"]
    assert run_command("train", str(recipe), "--dry-run") == 0
    assert "Nothing was started" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


OUTCOMES = [
    (errors.ConfigError("wrong field"), 2, "error: wrong field"),
    (errors.LayoutError("wrong layout"), 2, "error: wrong layout"),
    (errors.EngineNotFound("no engine"), 2, "error: no engine"),
    (errors.CheckpointDamaged("truncated"), 1, "error: truncated"),
    (errors.RankFailed("rank 1 failed", 1, "Traceback of rank 1"), 1, "Traceback of rank 1"),
    (NothingLearned("stop_on.nan"), 3, "stop_on.nan"),
    (StoppedBySignal("stopped by SIGTERM"), 75, "stopped by SIGTERM"),
    (EndedBySignal(signal.SIGUSR1), 128 + signal.SIGUSR1, "ended at once by SIGUSR1"),
    (KeyboardInterrupt(), 130, "interrupted; there is no checkpoint yet"),
    (errors.BatchError("line 3"), 2, "error: line 3"),
    (StepError("no field"), 1, "error: no field"),
]


@pytest.mark.parametrize(("outcome", "code", "message"), OUTCOMES)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: BaseException,
    code: int,
    message: str,
) -> None:
    stand_in(monkeypatch, outcome)
    assert run_command("train", "recipe.yaml") == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_unexpected_error_keeps_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["train", "recipe.yaml"])


def test_a_missing_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", "no_such_recipe.yaml") == 2
    assert "no_such_recipe.yaml" in capsys.readouterr().err


HEAVY = {"torch", "transformers", "numpy", "pydantic", "tensorboard", "safetensors", "matplotlib"}


@pytest.mark.parametrize(
    "statement",
    [
        "import core_rl_trainer; dir(core_rl_trainer)",
        "from core_rl.registry.objects import load_object; load_object('core_rl_trainer.cli.train:train', 'train')",
        "from core_rl.cli import plugin_commands; assert 'train' in plugin_commands()",
    ],
    ids=["package", "entry point", "commands"],
)
def test_the_package_and_its_command_load_without_torch(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.parametrize("name", core_rl_trainer.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    exported: Any = getattr(core_rl_trainer, name)
    assert name in ("__version__", "Event") or exported.__name__ == name
    assert name in dir(core_rl_trainer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = core_rl_trainer.Trainer
