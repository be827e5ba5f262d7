"""The arithmetic recipes on ``fsdp`` and on ``reference``: the same seed gives the same curve."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from core_rl.training import run_recipe

EXAMPLES = Path(__file__).parents[3] / "examples"
COMPARED = (
    "reward", "answer_tokens", "policy_loss", "approx_kl", "kl_before", "kl_coef", "grad_norm",
    "critic_value_loss", "critic_explained_variance", "critic_grad_norm", "eval_reward",
)  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    path = EXAMPLES / "arithmetic" / "prepare.py"
    spec = importlib.util.spec_from_file_location("arithmetic_prepare", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def start(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    settings = example.Settings(engine="reference", seed=0, batch_size=32, max_steps=40)
    example.prepare(settings, directory, Console(file=io.StringIO()))
    for path in directory.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:32]))
    return directory


def curve(name: str, engine: str, start: Path, output: Path) -> list[dict[str, Any]]:
    """The metrics of three steps of a recipe."""
    overrides = [
        f"engine={engine}",
        f"model.path={start}/model",
        f"data.train={start}/train.jsonl",
        f"data.eval={start}/eval.jsonl",
        f"output_dir={output}",
        "rollout.prompts_per_step=16",
        "reward=core_rl.training.rewards:integer_match",
        "steps=3",
    ]
    run_recipe(EXAMPLES / f"{name}_arithmetic.yaml", overrides, Console(file=io.StringIO()))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in COMPARED if key in row} for row in rows]


@pytest.mark.parametrize("name", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_curve_is_that_of_the_reference(name: str, start: Path, tmp_path: Path) -> None:
    """On two data-parallel ranks; what is left is rounding, which three steps of Adam amplify."""
    found = curve(name, "fsdp", start, tmp_path / "fsdp")
    expected = curve(name, "reference", start, tmp_path / "reference")
    assert len(found) == 4
    for step, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-4), f"step {step}"
