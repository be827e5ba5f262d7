"""Runs from Python: recipes as objects, events, callbacks that stop a run or fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console

from core_rl.errors import ConfigError
from core_rl_trainer import (
    Callback,
    CheckpointSaved,
    EvaluationEnd,
    Event,
    Recipe,
    RunEnd,
    RunFailed,
    StepEnd,
    StopRun,
    load_recipe,
    train,
)
from core_rl_trainer.errors import CallbackError
from core_rl_trainer.logs.progress import TrainingProgress
from core_rl_trainer.run.callbacks import Callbacks

CALLBACKS = '''
class Recorder:
    """Writes the names of the events into the directory of the run."""

    def __init__(self):
        self.names = []

    def __call__(self, event):
        self.names.append(type(event).__name__)
        (event.recipe.directory / "events.txt").write_text(" ".join(self.names))


class Picky:
    def __init__(self, settings):
        pass


text = "no callback"
'''


@pytest.fixture(scope="module")
def start(start: Path) -> Path:
    (start / "callbacks.py").write_text(CALLBACKS)
    return start


def values(start: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return support.supervised_values(start, output, "sft", **changes)


def quiet() -> Console:
    return Console(file=StringIO())


def name_of(event: Event) -> str:
    return f"{type(event).__name__} {event.step}"


def stop_at(kind: type[Event], step: int) -> Callback:
    def stop(event: Event) -> None:
        if isinstance(event, kind) and event.step == step:
            raise StopRun("enough")

    return stop


def test_callbacks_get_all_events_in_order(start: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    recorder = f"{start}/callbacks.py:Recorder"
    recipe = values(start, tmp_path / "out", callbacks=[recorder])
    result = train(recipe, ["steps=2"], callbacks=[events.append], console=quiet())
    names = ["EvaluationEnd 0", "StepEnd 1", "StepEnd 2", "EvaluationEnd 2", "CheckpointSaved 2", "RunEnd 2"]
    assert [name_of(event) for event in events] == names
    assert (tmp_path / "out" / "events.txt").read_text().split() == [name.split()[0] for name in names]
    rows = support.curve(tmp_path / "out")
    steps = [event.metrics["loss"] for event in events if isinstance(event, StepEnd)]
    assert steps == [row["loss"] for row in rows[1:]]
    assert isinstance(events[-1], RunEnd) and events[-1].result == result and result["stopped"] is None
    assert isinstance(events[-2], CheckpointSaved) and events[-2].path.is_dir()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "step", "last"),
    [
        (EvaluationEnd, 0, 0),
        pytest.param(StepEnd, 1, 1, marks=pytest.mark.nightly),
        (CheckpointSaved, 2, 3),
    ],  # a checkpoint is there after the next step
    ids=["start", "step", "save"],
)
def test_run_stopped_by_callback_resumes_exactly(
    start: Path, tmp_path: Path, unbroken: Path, kind: type[Event], step: int, last: int
) -> None:
    recipe, log = values(start, tmp_path / "out"), StringIO()
    result = train(recipe, callbacks=[stop_at(kind, step)], console=Console(file=log))
    reason = "callback 'stop_at.<locals>.stop': enough"
    assert (result["steps"], result["stopped"]) == (last, reason)
    assert f"stopped after step {last} by the {reason}; the same run again goes on" in log.getvalue()
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert (status["status"], status["problem"]) == ("stopped", reason)
    assert train(recipe, console=quiet())["stopped"] is None
    assert support.curve(tmp_path / "out") == support.curve(unbroken)


@pytest.fixture(scope="module")
def unbroken(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    train(values(start, directory), console=quiet())
    return directory


def test_callback_error_names_callback_and_reaches_all(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def broken(event: Event) -> None:
        raise KeyError("eval_reward")

    with pytest.raises(
        CallbackError, match=r"broken' raised KeyError: 'eval_reward' \(.*py:\d+\), at EvaluationEnd"
    ):
        train(values(start, tmp_path / "out"), callbacks=[events.append, broken], console=quiet())
    assert [type(event) for event in events] == [EvaluationEnd, RunFailed]
    assert isinstance(events[1], RunFailed) and isinstance(events[1].error, CallbackError)
    assert "at RunFailed of step 0" in caplog.text  # a second error hides no first one


NO_CALLBACKS: list[tuple[Callable[[Path], str], str]] = [
    (lambda start: "patience", r"there is no callback 'patience'; Known: none; or write 'module:Class'"),
    (lambda start: f"{start}/callbacks.py:text", "'no callback' cannot be called"),
    (
        lambda start: f"{start}/callbacks.py:Picky",
        r"Picky\(\) raised TypeError: .*'settings'; a callback that",
    ),
    (lambda start: f"{start}/callbacks.py:Recoder", "did you mean 'Recorder'"),
]


@pytest.mark.parametrize(("name", "message"), NO_CALLBACKS)
def test_invalid_callback_is_refused_by_name(
    start: Path, tmp_path: Path, name: Callable[[Path], str], message: str
) -> None:
    recipe = load_recipe(values(start, tmp_path / "out", callbacks=[name(start)]))
    with pytest.raises(ConfigError, match=f"field 'callbacks': .*{message}"):
        Callbacks(recipe)


def test_a_class_is_no_callback(start: Path, tmp_path: Path) -> None:
    class Stopper:
        def __call__(self, event: Event) -> None: ...

    recipe = load_recipe(values(start, tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"Stopper is a class; pass an instance: Stopper\(\)"):
        Callbacks(recipe, [Stopper])  # type: ignore[list-item]
    assert Callbacks(recipe, [Stopper(), Stopper()]).stopped is None


# ----------------------------------------------------------------------- recipes as objects


def test_python_recipe_equals_yaml_recipe(start: Path, tmp_path: Path) -> None:
    plain = values(start, tmp_path / "{engine}-{seed}")
    expected = load_recipe(support.write_recipe(tmp_path / "r.yaml", plain), ["seed=3", "optimizer.lr=0.5"])
    paths = plain | {
        "seed": 3,
        "model": {"path": start / "model"},
        "data": {"train": start / "train.jsonl", "eval": start / "eval.jsonl", "batch_size": 6},
    }
    built = Recipe(**paths)
    assert load_recipe(built, ["optimizer.lr=0.5"]) == expected
    assert load_recipe(paths, ["optimizer.lr=0.5"]) == expected
    sections = {"model": built.model, "data": built.data, "algorithm": built.algorithm}
    assert load_recipe(Recipe(**paths | sections), ["optimizer.lr=0.5"]) == expected
    assert load_recipe(expected) == expected
    assert expected.output_dir == f"{tmp_path}/reference-3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2}, "recipe: unknown field 'step' = 2; did you mean 'steps'?"),
        ({"data": {"train": "none.jsonl", "eval": "none.jsonl"}}, "recipe: 2 problems:\n.*none.jsonl'"),
        ({"wandb": {"api_key": "k"}}, r"field 'wandb.api_key' = \*\*\*"),
    ],
)
def test_errors_of_recipe_mapping_are_named(
    start: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(values(start, tmp_path / "out") | change)


# ----------------------------------------------------------------------- notebooks


@pytest.mark.parametrize(("spec", "bar"), [(object(), True), (None, False)], ids=["widgets", "no widgets"])
def test_notebook_bar_needs_widgets(monkeypatch: pytest.MonkeyPatch, spec: object, bar: bool) -> None:
    monkeypatch.setattr("core_rl_trainer.logs.progress.find_spec", lambda name: spec)
    console = Console(file=StringIO(), force_jupyter=True, record=True)
    progress = TrainingProgress(console, total=1, done=0)
    progress.show(1, {"loss": 0.5, "tokens_per_s": 1.0})
    assert progress.disable is not bar
    assert "step 1/1  loss 0.5000" in console.export_text()


@pytest.mark.nightly
def test_script_without_main_guard_raises_once(start: Path, tmp_path: Path) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, tmp_path / "out"))
    script = tmp_path / "script.py"
    script.write_text(f"from core_rl_trainer import train\ntrain({str(recipe)!r})\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 1
    assert "needs an `if __name__ == '__main__':`" in ended.stderr
