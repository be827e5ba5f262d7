"""Runs with Muon, rules for parameters and a schedule by function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from safetensors.torch import load_file

SCHEDULE = "def warmed(step, total):\n    return min(1.0, (step + 1) / 2) * (1 - step / (2 * total))\n"
ENGINES: dict[str, dict[str, Any]] = {
    "reference": {},
    "fsdp": {"engines": {"fsdp": {"layout": {"dp": 2}}}},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = support.make_start(tmp_path_factory.mktemp("start"))
    (directory / "schedule.py").write_text(SCHEDULE)
    return directory


def command(start: Path, directory: Path, engine: str) -> list[str]:
    optimizer = {
        "type": "muon",
        "lr": 0.01,
        "weight_decay": 0.1,
        "rules": [{"pattern": "model.embed_tokens.*", "lr_factor": 0.1, "weight_decay": 0.0}],
        "schedule": f"{start / 'schedule.py'}:warmed",
    }
    changes = {"engine": engine, "optimizer": optimizer, "save_every": 1, **ENGINES[engine]}
    values = support.supervised_values(start, directory / "out", "sft", **changes)
    directory.mkdir()
    recipe = support.write_recipe(directory / "r.yaml", values)
    return [sys.executable, "-m", "core_rl.cli", "train", str(recipe)]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_with_muon_goes_on_bit_for_bit(start: Path, tmp_path: Path, engine: str) -> None:
    support.run_killed(command(start, tmp_path / "unbroken", engine), tmp_path / "unbroken" / "out", rows=())
    support.run_killed(command(start, tmp_path / "killed", engine), tmp_path / "killed" / "out", rows=(2, 3))
    unbroken, killed = (tmp_path / name / "out" for name in ("unbroken", "killed"))
    assert support.curve(killed) == support.curve(unbroken)
    assert [row["lr"] for row in support.curve(unbroken)[1:]] == pytest.approx(
        [0.005, 0.00875, 0.0075, 0.00625]
    )
    own, expected = (load_file(path / "model" / "model.safetensors") for path in (killed, unbroken))
    assert own.keys() == expected.keys()
    assert all(bool((own[name] == value).all()) for name, value in expected.items())
