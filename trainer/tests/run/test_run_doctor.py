"""``doctor`` of a recipe: the engine that is off the oracle is named, and right ones are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import training_support as support

from core_rl.errors import ConfigError
from core_rl.registry.engines import register_engine
from core_rl_trainer.recipe.recipe import load_recipe
from core_rl_trainer.run import doctor


def run(start: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    values = support.recipe_values(
        start, output, **{"doctor": {"every": 2}, "steps": 3, "eval_every": 0} | changes
    )
    support.run(values)
    return support.curve(output)[1:]


def off(records: list[logging.LogRecord]) -> list[str]:
    return [text for record in records if "off the float64 oracle" in (text := record.getMessage())]


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"lora": {"rank": 2, "alpha": 4}}}, {"rollout": {"temperature": 0.7}}]
)
def test_right_engines_are_within_rounding(
    changes: dict[str, Any], start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = support.recipe_values(start, tmp_path)
    merged = {
        name: {**values[name], **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    rows = run(start, tmp_path / "out", **merged)
    assert ["doctor_train_max" in row for row in rows] == [True, False, True]
    judged = (rows[0], rows[2])
    assert all(row["doctor_train_ratio"] <= 1 and row["doctor_rollout_ratio"] <= 1 for row in judged)
    assert not off(caplog.records)
    (cost,) = [text for text in caplog.messages if "the doctor takes" in text]
    assert cost.startswith("step 3: ") and "% of the run's time; doctor.every=" in cost
    assert "time_doctor_s" in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[1]
    assert not (tmp_path / "out" / "doctor").exists()


def test_stale_tokens_meet_their_own_weights(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Asynchronous: tokens that weights have drawn come to the trainer after further updates."""
    values = support.recipe_values(start, tmp_path)
    rollout = values["rollout"] | {"max_head_offpolicyness": 1}
    rows = run(start, tmp_path / "out", rollout=rollout, steps=5)
    assert [row["step"] for row in rows if "doctor_train_ratio" in row] == [1, 3, 5]
    judged = {row["step"]: row["doctor_rollout_ratio"] for row in rows if "doctor_rollout_ratio" in row}
    assert {1, 4} <= judged.keys()
    assert max(judged.values()) <= 1
    assert not off(caplog.records)
    assert not (tmp_path / "out" / "doctor").exists()


def test_wrong_rollout_engine_is_named(start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollout = support.recipe_values(start, tmp_path)["rollout"] | {"engine": support.SHIFTED.name}
    with register_engine(support.SHIFTED):
        rows = run(start, tmp_path / "out", rollout=rollout)
    assert rows[0]["doctor_rollout_max"] == pytest.approx(support.SHIFT, rel=0.01)
    assert rows[0]["doctor_train_ratio"] <= 1
    (first, second) = off(caplog.records)
    assert first.startswith(
        "step 1: the rollout engine 'shifted-rollout' is off the float64 oracle by up to 1.0e-03"
    )
    assert second.startswith("step 3: the rollout engine")


def test_failed_judge_leaves_the_run(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "judgement_of", support.make_tokenizer)
    rows = run(start, tmp_path / "out")
    assert len(rows) == 3
    assert "doctor_train_max" not in rows[0]
    assert any("step 1: the doctor could not judge the engines" in text for text in caplog.messages)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"path": "{model}", "vision": True}},
        {"rollout": {"logit_bias": {3: 1.0}}},
        {"rollout": {"repetition_penalty": 1.1}},
    ],
)
def test_doctor_of_other_logits_is_refused(changes: dict[str, Any], start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path, doctor={})
    for name, fields in changes.items():
        values[name] = values[name] | fields | ({"path": values[name]["path"]} if name == "model" else {})
    with pytest.raises(ConfigError, match="doctor judges text models"):
        load_recipe(values)


def test_doctor_without_rollouts_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no use for 'doctor'"):
        support.run(support.supervised_values(start, tmp_path / "out", "sft", doctor={}))
