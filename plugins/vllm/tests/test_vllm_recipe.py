"""The example of training with vLLM servers."""

from __future__ import annotations

from pathlib import Path

from vllm_support import tiny_model

from core_rl import get_spec, load_config
from core_rl.config.base import parse_config
from core_rl_trainer.recipe.recipe import load_recipe

RECIPE = Path(__file__).parents[3] / "examples" / "grpo_vllm.yaml"


def test_recipe_uses_vllm_servers(tmp_path: Path) -> None:
    sums = tmp_path / "sums.jsonl"
    sums.write_text('{"prompt": "01+02=", "answer": "003"}\n')
    prepared = {"data.train": sums, "data.eval": sums, "model.path": tiny_model(tmp_path)}
    recipe = load_recipe(RECIPE, [f"{field}={path}" for field, path in prepared.items()])
    assert recipe.rollout is not None
    assert recipe.rollout.engine == "vllm"
    section = recipe.engines["vllm"]
    parse_config(load_config(get_spec("vllm")), {**section, "model": {"path": "."}})
