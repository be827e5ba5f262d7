"""The example recipe with the engine, alone and between two others."""

from __future__ import annotations

import io
from pathlib import Path

import arithmetic_support as arithmetic
import pytest
from changing_engines import violations_of_changes
from rich.console import Console
from training_support import curve

from core_rl_trainer import train

STAGES = (("fsdp", {"dp": 2}), ("mindspore", {"dp": 2}), ("megatron", {"pp": 2}))


def test_recipe_runs_with_engine(tmp_path: Path) -> None:
    start = arithmetic.make_start(tmp_path / "start", max_steps=2)
    short = ["rollout.prompts_per_step=4", "steps=2", "eval_samples=1", f"output_dir={tmp_path / 'run'}"]
    overrides = arithmetic.overrides_for(start, "mindspore", *short)
    train(arithmetic.recipe_of("grpo"), overrides, console=Console(file=io.StringIO()))
    assert len(curve(tmp_path / "run")) == 3


@pytest.mark.nightly
def test_recipe_changes_engines_within_rounding(tmp_path: Path) -> None:
    """GRPO under fsdp, MindSpore and megatron, with the curve of a run that is never broken."""
    assert not violations_of_changes(tmp_path, STAGES)
