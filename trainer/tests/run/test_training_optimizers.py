"""Runs with Muon or moments of 8 bits, rules for parameters and a schedule by function."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SCHEDULE = "def warmed(step, total):\n    return min(1.0, (step + 1) / 2) * (1 - step / (2 * total))\n"
ENGINES: dict[str, dict[str, Any]] = {"reference": {}, "fsdp": {"engines": {"fsdp": {"layout": {"dp": 2}}}}}


@pytest.fixture(scope="module")
def start(start: Path) -> Path:
    """A model with matrices of 8,192 weights: half of one is enough for moments of 8 bits."""
    wide = AutoConfig.from_pretrained(start / "model", intermediate_size=512)
    AutoModelForCausalLM.from_config(wide).save_pretrained(start / "model")
    (start / "schedule.py").write_text(SCHEDULE)
    return start


def command(start: Path, directory: Path, engine: str, kind: str) -> list[str]:
    optimizer = {
        "type": kind,
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
@pytest.mark.parametrize(
    "kind",
    [
        "muon",
        pytest.param(
            "adamw_8bit", marks=pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_goes_on_bit_for_bit(start: Path, tmp_path: Path, engine: str, kind: str) -> None:
    unbroken, killed = (tmp_path / name / "out" for name in ("unbroken", "killed"))
    support.run_killed(command(start, unbroken.parent, engine, kind), unbroken, rows=())
    support.run_killed(command(start, killed.parent, engine, kind), killed, rows=(2, 3))
    assert support.curve(killed) == support.curve(unbroken)
    assert [row["lr"] for row in support.curve(unbroken)[1:]] == pytest.approx(
        [0.005, 0.00875, 0.0075, 0.00625]
    )
    resumed, expected = (load_file(path / "model" / "model.safetensors") for path in (killed, unbroken))
    assert resumed.keys() == expected.keys()
    assert all(bool((resumed[name] == value).all()) for name, value in expected.items())
