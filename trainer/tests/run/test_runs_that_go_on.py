"""Runs that are extended, moved, stopped by a signal, or started from another one's checkpoint."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from safetensors.torch import load_file, save_file
from training_support import run

from core_rl.data.batch import SequenceBatch
from core_rl.errors import CheckpointDamaged, CheckpointMismatch, ConfigError, WeightsError
from core_rl_trainer import dry_run, train
from core_rl_trainer.errors import NothingLearned, StoppedBySignal
from core_rl_trainer.run.records import RunRecords
from core_rl_trainer.run.signals import EndedBySignal
from core_rl_trainer.run.supervised import SupervisedLearner

LINEAR = {"lr": 0.01, "schedule": {"type": "linear"}}


def sft(start: Path, directory: Path, **changes: Any) -> Path:
    values = support.supervised_values(start, directory / "out", "sft", **changes)
    return support.write_recipe(directory / "r.yaml", values)


@pytest.fixture(scope="module")
def finished(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a complete run of two steps, with a linear schedule."""
    directory = tmp_path_factory.mktemp("finished")
    run(sft(start, directory, optimizer=LINEAR, steps=2, eval_every=0))
    return directory / "out"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """That run somewhere else."""
    return shutil.copytree(finished, tmp_path / "moved")


def rates(output: Path) -> list[float]:
    return [row["lr"] for row in support.curve(output)[1:]]


def test_extended_moved_run_keeps_schedule(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = run(copied / "recipe.yaml")
    assert before["model"] == str(copied / "model") and before["steps"] == 2
    with caplog.at_level(logging.WARNING):
        after = run(copied / "recipe.yaml", "steps=3", "save_every=1", "keep=1")
    assert after["steps"] == 3 and after["before"] == before["before"]
    assert rates(copied) == pytest.approx([0.01, 0.005, 0.0])
    assert "the learning rate stays at 0 from step 2 on" in caplog.text
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step-00000003"]
    run(copied / "recipe.yaml", "steps=4", "optimizer.schedule_steps=5")
    assert rates(copied)[3] == pytest.approx(0.004)
    assert json.loads((copied / "result.json").read_text())["steps"] == 4


FORBIDDEN_CHANGES = [
    (["steps=1"], "steps = 1, and the run in .* has a checkpoint of step 2; set steps to 2 or more"),
    (["seed=1"], r"fresh=true.*seed: 0 then, 1 now \(the order of the data follows from it\)"),
    (["optimizer.lr=1", "steps=3"], r"optimizer.lr: 0.01 then, 1.0 now \(the moments in the checkpoint"),
    (["engine=fsdp"], r"resume_from=DIR.*engine: .*same engine and layout"),
    (["output_dir=new", "resume_from=nowhere"], r"resume_from = '.*/nowhere': there is no such directory"),
    (["resume_from={run}", "fresh=true"], "is the run in output_dir itself, which the same command resumes"),
    (["resume_from={run}", "output_dir=new", "seed=3"], "shares its model and the order of its data.*seed"),
    (["resume_from={run}", "output_dir=new", "steps=1"], "is of step 2, from which the run counts on"),
]


@pytest.mark.parametrize(("overrides", "message"), FORBIDDEN_CHANGES)
def test_forbidden_changes_are_named_with_reason(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = (finished / "recipe.yaml").read_text()
    for start in (dry_run, train):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            start(finished / "recipe.yaml", [text.format(run=finished) for text in overrides])
    assert (finished / "recipe.yaml").read_text() == recipe
    assert not (tmp_path / "new").exists()


def test_damaged_checkpoint_shows_in_dry_run(copied: Path) -> None:
    (copied / "checkpoints" / "step-00000002" / "state.json").write_text("")
    with pytest.raises(CheckpointDamaged, match="state.json: 0 bytes"):
        dry_run(copied / "recipe.yaml", ["steps=3"])


def test_data_files_count_by_their_content(start: Path, copied: Path, tmp_path: Path) -> None:
    same = shutil.copy(start / "train.jsonl", tmp_path / "same.jsonl")
    copy = tmp_path / "other.jsonl"
    copy.write_text((start / "train.jsonl").read_text().replace('"answer": 0', '"answer": 1'))
    assert run(copied / "recipe.yaml", f"data.train={same}")["steps"] == 2
    with pytest.raises(ConfigError, match=r"data.train.0: the content has changed since the run began"):
        run(copied / "recipe.yaml", f"data.train={copy}", "steps=3")


@pytest.mark.nightly
def test_run_resumes_from_changed_layout_and_engine(start: Path, tmp_path: Path) -> None:
    two = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}, "optimizer": LINEAR}
    first = sft(start, tmp_path, **two)
    run(first, "steps=2")
    new = ["engine=reference", f"output_dir={tmp_path}/new", f"resume_from={tmp_path}/out"]
    with pytest.raises(CheckpointMismatch, match="saved by the engine 'fsdp' .*save_portable_every=N"):
        run(first, *new)
    run(first, "steps=2", "save_portable_every=2")  # a complete run gets its missing outputs
    source = tmp_path / "out" / "checkpoints" / "step-00000002"
    run(first, "steps=2", "save_every=2", *new, "save_portable_every=2")
    checkpoint = tmp_path / "new" / "checkpoints" / "step-00000002"
    run(first, *new)
    assert [row["step"] for row in support.curve(tmp_path / "new")][-2:] == [3, 4]
    # The rate, the data order and the moments equal the run that never changed its engine.
    run(first)
    old, resumed = support.curve(tmp_path / "out")[3:], support.curve(tmp_path / "new")[-2:]
    for left, right in zip(old, resumed, strict=True):
        assert left["lr"] == right["lr"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
    assert source.exists() and checkpoint.exists()


def test_run_failed_before_first_step_frees_directory(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = sft(start, tmp_path, steps=1, save_every=1)

    def fails(learner: SupervisedLearner, batch: SequenceBatch, step: int) -> dict[str, float]:
        raise ConfigError("a layout that the model does not have")

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLearner, "update", fails)
        with pytest.raises(ConfigError, match="a layout"):
            run(recipe)
    assert run(recipe, "seed=1")["seed"] == 1
    with pytest.raises(ConfigError, match="holds another run"):
        run(recipe, "seed=2")


def test_run_resumes_exactly_after_sigterm(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = sft(start, tmp_path, steps=3, save_every=9)
    update = SupervisedLearner.update

    def signalled(learner: SupervisedLearner, batch: SequenceBatch, step: int) -> dict[str, float]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(learner, batch, step)

    run(unbroken, f"output_dir={tmp_path}/unbroken")
    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLearner, "update", signalled)
        with pytest.raises(StoppedBySignal, match="stopped by SIGTERM after step 2"):
            run(unbroken)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "stopped by SIGTERM" in (tmp_path / "out" / "index.html").read_text()
    assert not (tmp_path / "out" / "result.json").exists()
    run(unbroken)
    assert support.curve(tmp_path / "out") == support.curve(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("method", "save_every", "last"),
    [
        pytest.param("add_samples", 2, 2, id="before the save"),
        pytest.param("sync", 2, 2, id="in the save"),
        pytest.param("draw", 9, 3, id="after the choice not to save"),
    ],
)
def test_signal_within_step_saves_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, save_every: int, last: int
) -> None:
    """``method`` of the records is called at that place of each step with an evaluation, which step 2 is."""
    original = getattr(RunRecords, method)

    def signalled(records: RunRecords, *arguments: Any) -> Any:
        if len(support.curve(tmp_path / "out")) >= 2 and not sent:
            sent.append(method)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(records, *arguments)

    sent: list[str] = []
    monkeypatch.setattr(RunRecords, method, signalled)
    with pytest.raises(StoppedBySignal, match=f"after step {last}, of which there is a checkpoint"):
        run(sft(start, tmp_path, steps=5, save_every=save_every, eval_every=2))
    assert (tmp_path / "out" / "checkpoints" / f"step-{last:08d}").is_dir()


def test_a_second_signal_ends_the_run_at_once(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SupervisedLearner.update

    def signalled(learner: SupervisedLearner, batch: SequenceBatch, step: int) -> dict[str, float]:
        for _ in range(2 if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGUSR1)
        return update(learner, batch, step)

    monkeypatch.setattr(SupervisedLearner, "update", signalled)
    with pytest.raises(EndedBySignal, match="at once by SIGUSR1"):
        run(sft(start, tmp_path, steps=3, save_every=1))
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_all_processes_stops_run(start: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Signal as Slurm sends it: to the driver, to the fork server, and to the ranks."""
    recipe = sft(start, tmp_path, steps=500, engine="fsdp", engines={"fsdp": {"layout": {"dp": 2}}})
    command = [sys.executable, "-m", "core_rl.cli", "train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    for pid in reversed(_family(process.pid)):
        os.kill(pid, number)
    _, text = process.communicate(timeout=300)
    assert process.returncode == 75, text
    assert f"stopped by {number.name} after step" in text
    assert "Traceback" not in text
    steps = [row["step"] for row in support.curve(tmp_path / "out")]
    assert (tmp_path / "out" / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()


def _family(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    pids = [pid]
    for member in pids:
        pids += children.get(member, [])
    return pids


def test_nonfinite_weights_name_file(start: Path, tmp_path: Path) -> None:
    shutil.copytree(start / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    message = rf"model.path: .*model.safetensors has NaN or infinity in {name} \(1 of 384 values\)"
    with pytest.raises(WeightsError, match=message):
        run(sft(start, tmp_path, model={"path": str(tmp_path / "model")}))
    values = support.recipe_values(start, tmp_path / "rl", model={"path": str(tmp_path / "model")})
    with pytest.raises(WeightsError, match=message):
        run(support.write_recipe(tmp_path / "rl.yaml", values))


def test_nonfinite_loss_keeps_previous_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SupervisedLearner.update

    def spoiled(learner: SupervisedLearner, batch: SequenceBatch, step: int) -> dict[str, float]:
        metrics = update(learner, batch, step)
        return metrics | ({"loss": float("nan")} if step == 2 else {})

    monkeypatch.setattr(SupervisedLearner, "update", spoiled)
    with pytest.raises(NothingLearned, match="stop_on.nan: loss is nan.*good checkpoint is that of step 1"):
        run(sft(start, tmp_path, save_every=1, stop_on={"nan": True}))
