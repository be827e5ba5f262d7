"""Differences between two trainers in plain torch are named, alone and together."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trainers.recipes import SPEC, RecipeTrainer

from core_rl_conformance.differences.replay import Measured, compare_measured, measure_trainer
from core_rl_conformance.differences.run import MODEL, drawn_rows, rollouts_of
from core_rl_conformance.inputs.tiny_models import ModelStore

BY_DAY = ("nothing", "mask", "seed", "several", "update", "bfloat16")
LOW = ("bfloat16", "float16")
ROLLOUTS = rollouts_of(drawn_rows(0), MODEL.vocab_size, 0)

PAIRS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "mask": ({"flags": ["no EOS"]}, ["mask"]),
    "prompts": ({"flags": ["prompts"]}, ["mask"]),
    "whitening": ({"flags": ["whitened"]}, ["advantages"]),
    "rule": ({"advantages": "rloo"}, ["advantages"]),
    "temperature": ({"loss": {"temperature": 0.7}}, ["temperature"]),
    "objective": ({"loss": {"objective": "gspo"}}, ["objective"]),
    "clip bound": ({"loss": {"clip_high": 0.2}}, ["clip bounds"]),
    "KL": ({"loss": {"kl_coef": 0.05, "kl_estimator": "k1"}}, ["KL"]),
    "entropy": ({"loss": {"entropy_coef": 0.01}}, ["entropy"]),
    "aggregation": ({"loss": {"aggregation": "sequence_mean"}}, ["aggregation"]),
    "length": ({"loss": {"aggregation": "fixed_length"}}, ["aggregation"]),
    "cut": ({"flags": ["mean of micro-batches"]}, ["cut into micro-batches"]),
    "rate": ({"lr": 2e-3}, ["learning rate"]),
    "seed": ({"seed": 1}, ["order of data"]),
    "decay": ({"optimizer": {"weight_decay": 0.1}}, ["weight decay"]),
    "betas": ({"optimizer": {"betas": [0.8, 0.98]}}, ["betas"]),
    "clipping": ({"optimizer": {"max_grad_norm": 0.25}}, ["clipping norm"]),
    "update": (
        {"optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.1, "max_grad_norm": 2.0}, "lr": 1e-6},
        ["learning rate", "betas", "weight decay", "clipping norm"],
    ),
    "momentum": ({"flags": ["momentum"]}, ["betas", "weight decay", "clipping norm"]),
    "bfloat16": ({"flags": ["bfloat16"], "loss": {"kl_coef": 0.1}}, ["precision"]),
    "float16": ({"flags": ["float16"]}, ["precision"]),
    "several": (
        {
            "advantages": "dr_grpo",
            "loss": {
                "objective": "cispo",
                "kl_coef": 0.1,
                "kl_estimator": "k2",
                "aggregation": "sequence_mean",
            },
            "schedule": {"type": "linear", "total_steps": 5},
        },
        ["advantages", "objective", "KL", "aggregation", "learning rate"],
    ),
}


@cache
def _measured(settings: str) -> Measured:
    with tempfile.TemporaryDirectory() as place:
        directory, recipe = ModelStore(Path(place)).directory(MODEL), Path(place) / "settings.json"
        recipe.write_text(settings, encoding="utf-8")
        trainer = RecipeTrainer()
        trainer.build_recipe(str(recipe), str(directory))
        return measure_trainer(trainer, directory, ROLLOUTS, SPEC.features)


def _parameters() -> list[Any]:
    return [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in PAIRS]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", _parameters())
def test_diff_names_planted_differences(name: str) -> None:
    settings, expected = PAIRS[name]
    comparison = compare_measured(_measured("{}"), _measured(json.dumps(settings)), ROLLOUTS)
    assert [difference.term for difference in comparison.differences] == expected
    assert name in LOW or max(comparison.left.residual, comparison.right.residual) < 1e-3
    assert ("the terms of the losses" in comparison.uncompared) == (name in LOW)
    shares = [difference.share for difference in comparison.differences if difference.share is not None]
    assert not shares or sum(shares) == pytest.approx(1.0)
