"""The arithmetic recipes by one word on each train engine: their curves differ by what rounding alone does."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from core_rl_conformance.procedures.curves import Curve, Spread, curve_of, move_weights

EXAMPLES = Path(__file__).parents[3] / "examples"
REWARD = '''
"""A reward that a model which cannot add earns now and then."""


def right_digits(answer, sample):
    return sum(a == b for a, b in zip(answer, sample["answer"])) / 3
'''
ENGINES: dict[str, tuple[str, Sequence[str]]] = {
    "fsdp, dp 2": ("fsdp", ()),
    "megatron, tp 2": ("megatron", ()),
    "megatron, pp 2": ("megatron", ["engines.megatron.layout={pp: 2}"]),
}


@dataclass(frozen=True)
class Start:
    """A directory with a model that was hardly warmed up, a few problems and a reward."""

    path: Path

    def run(self, recipe: str, engine: str, model: Path, output: Path, more: Sequence[str] = ()) -> Curve:
        """The curve of three steps."""
        overrides = [
            f"engine={engine}",
            f"model.path={model}",
            f"data.train={self.path}/train.jsonl",
            f"data.eval={self.path}/eval.jsonl",
            f"reward={self.path}/reward.py:right_digits",
            "rollout.prompts_per_step=8",
            "eval_samples=1",
            "steps=3",
            *more,
        ]
        return curve_of(EXAMPLES / f"{recipe}_arithmetic.yaml", overrides, output)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    spec = importlib.util.spec_from_file_location(
        "arithmetic_prepare", EXAMPLES / "arithmetic" / "prepare.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    directory = tmp_path_factory.mktemp("start")
    settings = example.Settings(engine="reference", seed=0, batch_size=32, max_steps=40)
    example.prepare(settings, directory, Console(file=io.StringIO()))
    for path in directory.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:24]))
    (directory / "reward.py").write_text(REWARD)
    yield Start(directory)
    del sys.modules[spec.name]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_recipe_has_one_curve_on_all_engines(recipe: str, start: Start, tmp_path: Path) -> None:
    """PPO's critic is on the same engine as its actor, and moved with it."""
    model = start.path / "model"
    base = start.run(recipe, "reference", model, tmp_path / "reference")
    assert all(row["groups_without_signal"] < 1 and row["grad_norm"] > 0 for row in base[1:])
    moved = [
        start.run(recipe, "reference", move_weights(model, tmp_path / f"moved{n}", n), tmp_path / f"run{n}")
        for n in range(5)
    ]
    spread = Spread(base, moved)
    for name, (engine, more) in ENGINES.items():
        curve = start.run(recipe, engine, model, tmp_path / name.replace(" ", ""), more)
        assert not spread.violations(curve), name
