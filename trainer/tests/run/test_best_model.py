"""The model of the best evaluation: which one it is, and that an interruption changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from core_rl.errors import ConfigError
from core_rl_trainer.recipe.sections import KeepBest
from core_rl_trainer.run.best_model import BestModel


def keep(
    root: Path, mode: Literal["max", "min"] = "max", state: Mapping[str, Any] | None = None
) -> BestModel:
    rule = KeepBest(metric="eval_reward", mode=mode)
    return BestModel(rule, root / "best", root / "best_model", state)


def offer(best: BestModel, step: int, value: float) -> None:
    def save(path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text(str(step))

    best.offer(step, {"eval_reward": value}, save)


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "best").iterdir())


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("max", [0.1, 0.5, 0.5, 0.3], 1),
        ("min", [0.1, 0.5, 0.05, 0.3], 2),
        ("max", [math.nan, 0.2, math.inf, 0.1], 1),
    ],
)
def test_the_best_is_kept(
    tmp_path: Path, mode: Literal["max", "min"], values: list[float], expected: int
) -> None:
    best = keep(tmp_path, mode)
    for step, value in enumerate(values):
        offer(best, step, value)
        best.prune()
    assert kept(tmp_path) == [f"step-{expected:08d}"]
    assert (tmp_path / "best_model" / "weights").read_text() == str(expected)
    state = best.state_dict()
    assert state is not None and (state["step"], state["value"]) == (expected, values[expected])


def test_resumed_run_has_best_model_of_checkpoint(tmp_path: Path) -> None:
    best = keep(tmp_path)
    offer(best, 2, 0.5)
    best.prune()
    state = best.state_dict()
    offer(best, 3, 0.9)  # and is killed before the next checkpoint
    assert kept(tmp_path) == ["step-00000002", "step-00000003"]
    again = keep(tmp_path, state=state)
    assert kept(tmp_path) == ["step-00000002"]
    assert (tmp_path / "best_model" / "weights").read_text() == "2"
    offer(again, 3, 0.4)
    assert again.state_dict() == state


def test_fresh_run_has_no_best_model(tmp_path: Path) -> None:
    offer(keep(tmp_path), 0, 0.5)
    assert keep(tmp_path).state_dict() is None
    assert kept(tmp_path) == [] and not (tmp_path / "best_model").is_symlink()


def test_unknown_metric_is_named(tmp_path: Path) -> None:
    rule = KeepBest(metric="eval_rewards", mode="max")
    best = BestModel(rule, tmp_path / "best", tmp_path / "best_model", None)
    with pytest.raises(ConfigError, match="'eval_rewards'.*evaluations of this run have eval_reward"):
        offer(best, 0, 0.5)
