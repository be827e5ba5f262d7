"""Training runs with completions of a real server."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console
from vllm_support import backend_of, tiny_model

from core_rl.engine.inference import InferenceEngine
from core_rl_trainer import train

STEPS = 3


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Path:
    """Prompts and a tokenizer for the model that servers have."""
    start = support.make_start(tmp_path / "start")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model(root), name), start / "model" / name)
    return start


@pytest.mark.parametrize("sync", ["tensor", "distributed", "disk"])
def test_trained_weights_are_served(engine: InferenceEngine, start: Path, tmp_path: Path, sync: str) -> None:
    vllm = {"options": {"addresses": [backend_of(engine).servers[0].address], "take_over": True}}
    selected: dict[str, Any] = {"engine": "vllm", "sync": sync, "prompts_per_step": 6, "group_size": 3}
    values = support.recipe_values(
        start,
        tmp_path / "out",
        engine="fsdp",
        engines={"vllm": vllm},
        rollout={**selected, "max_new_tokens": 4},
        algorithm={"type_": "ppo_actor", "args": {"kl_coef": 0.0}},
        steps=STEPS,
    )
    train(support.write_recipe(tmp_path / "r.yaml", values), [], console=Console(file=io.StringIO()))
    rows = support.curve(tmp_path / "out")[1:]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["update_successful"] == 1 and 0 < row["mismatch_max"] < 1e-4 for row in rows)
