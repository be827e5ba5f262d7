"""The arithmetic recipes by one word on each train engine: their curves differ by what rounding alone does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import arithmetic_support as support
import pytest
from recipe_curves import Curve, Spread, curve_of, move_weights

ENGINES: dict[str, tuple[str, Sequence[str]]] = {
    "fsdp, dp 2": ("fsdp", ()),
    "megatron, tp 2": ("megatron", ()),
    "megatron, pp 2": ("megatron", ["engines.megatron.layout={pp: 2}"]),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model that was hardly warmed up, a few problems and a reward."""
    return support.make_start(tmp_path_factory.mktemp("start"))


def run(
    start: Path, recipe: str, engine: str, output: Path, model: Path | None = None, more: Sequence[str] = ()
) -> Curve:
    """The curve of three steps."""
    short = ["rollout.prompts_per_step=8", "eval_samples=1", "steps=3"]
    selected = [] if model is None else [f"model.path={model}"]
    overrides = support.overrides_for(start, engine, *short, *selected, *more)
    return curve_of(support.recipe_of(recipe), overrides, output)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_recipe_curve_is_equal_across_engines(recipe: str, start: Path, tmp_path: Path) -> None:
    """PPO's critic is on the same engine as its actor, and moved with it."""
    base = run(start, recipe, "reference", tmp_path / "reference")
    assert all(row["groups_without_signal"] < 1 and row["grad_norm"] > 0 for row in base[1:])
    models = [move_weights(start / "model", tmp_path / f"moved{n}", n) for n in range(5)]
    moved = [run(start, recipe, "reference", tmp_path / f"run{n}", model) for n, model in enumerate(models)]
    spread = Spread(base, moved)
    for name, (engine, more) in ENGINES.items():
        curve = run(start, recipe, engine, tmp_path / name.replace(" ", ""), more=more)
        assert not spread.violations(curve), name


@pytest.mark.nightly
def test_ppo_resumes_bit_for_bit_after_kills(start: Path, tmp_path: Path) -> None:
    """On two tensor parallel ranks, and two for the critic."""
    support.check_kills_change_nothing(start, "megatron", tmp_path)
