"""Runs on images: fine-tuning and rollouts of a tiny vision-language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from shapes_support import shapes
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from core_rl_trainer.api import train

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start")
    shapes().prepare(path, seed=0, trained=64, held_out=8)
    return path


def overrides(start: Path, output: Path, **settings: object) -> list[str]:
    common = {
        "engine": "reference",
        "model.path": str(start / "model"),
        "data.train": str(start / "train.jsonl"),
        "data.eval": str(start / "eval.jsonl"),
        "steps": 2,
        "save_every": 2,
        "output_dir": str(output),
    }
    return [f"{name}={yaml.safe_dump(value).strip()}" for name, value in {**common, **settings}.items()]


def metrics_of(output: Path) -> list[dict[str, float]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [yaml.safe_load(line) for line in lines]


def test_fine_tuning_keeps_a_frozen_tower(start: Path, tmp_path: Path) -> None:
    output = tmp_path / "sft"
    frozen = {"model.frozen": ["*visual.blocks.*"], "data.batch_size": 16, "eval_every": 2}
    train(EXAMPLES / "sft_shapes.yaml", overrides(start, output, **frozen))
    before, after = (load_file(path / "model.safetensors") for path in (start / "model", output / "model"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any("visual.blocks" in name for name in moved)
    assert {"model.visual.merger.linear_fc1.weight", "lm_head.weight"} <= moved
    assert 'src="data:image/png' in (output / "index.html").read_text()
    model = AutoModelForImageTextToText.from_pretrained(output / "model")
    assert (
        AutoImageProcessor.from_pretrained(output / "model").patch_size
        == model.config.vision_config.patch_size
    )


def test_rollouts_learn_from_images(start: Path, tmp_path: Path) -> None:
    """The rollout engine and the train engine see the same images: their log-probs agree."""
    output = tmp_path / "grpo"
    few = {"rollout.prompts_per_step": 4, "rollout.group_size": 2, "eval_every": 2}
    train(EXAMPLES / "grpo_shapes.yaml", overrides(start, output, **few))
    mismatch = [row["mismatch_max"] for row in metrics_of(output) if "mismatch_max" in row]
    assert len(mismatch) == 2
    assert max(mismatch) < 1e-4
    assert (output / "index.html").read_text().count('src="data:image/png') >= 4
