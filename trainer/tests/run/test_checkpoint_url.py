"""Runs whose checkpoints are copied to a URL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import training_support as support
from fsspec.implementations.local import LocalFileSystem
from training_support import run

from core_rl.errors import CheckpointError, ConfigError


def copied(store: Path) -> list[str]:
    return sorted(entry.name for entry in store.iterdir())


@pytest.mark.nightly
def test_run_without_directory_resumes_from_url(start: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    values = support.supervised_values(start, out, "sft", steps=3, save_every=1, keep=2)
    run(support.write_recipe(tmp_path / "plain.yaml", values | {"output_dir": str(tmp_path / "unbroken")}))
    recipe = support.write_recipe(tmp_path / "r.yaml", values | {"checkpoint_url": f"file://{store}"})
    run(recipe, "steps=2", "optimizer.schedule_steps=3")
    assert copied(store) == ["step-00000001", "step-00000002"]
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match=r"holds another run.*seed: 0 then, 1 now"):
        run(recipe, "seed=1", "optimizer.schedule_steps=3")
    shutil.rmtree(out)
    run(recipe, "optimizer.schedule_steps=3")
    assert support.curve(out)[-1]["loss"] == support.curve(tmp_path / "unbroken")[-1]["loss"]
    assert [row["step"] for row in support.curve(out)] == [3]
    assert copied(store) == ["step-00000002", "step-00000003"]
    run(recipe, "fresh=true", "steps=1")
    assert copied(store) == ["step-00000001"]


def test_run_with_failed_upload_resumes_from_directory(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    values = support.supervised_values(start, out, "sft", steps=2, save_every=1, eval_every=0)
    recipe = support.write_recipe(tmp_path / "r.yaml", values | {"checkpoint_url": f"file://{store}"})

    def fail(*_: object) -> None:
        raise OSError("the connection was reset")

    with monkeypatch.context() as patches:
        patches.setattr(LocalFileSystem, "put_file", fail)
        with pytest.raises(CheckpointError, match=rf"to 'file://{store}'.*the connection was reset"):
            run(recipe)
    assert json.loads((out / "status.json").read_text())["status"] == "stopped"
    assert not any((store / name / "manifest.json").exists() for name in copied(store))
    assert run(recipe)["steps"] == 2
    assert copied(store) == ["step-00000002"]  # the remains of step 1 are gone
