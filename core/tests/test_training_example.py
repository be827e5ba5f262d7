"""The arithmetic example: its problems, its tokenizer, and its recipe."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_rl.training import load_recipe
from core_rl.training.data import encode_prompt, read_jsonl
from core_rl.training.rewards import TextReward, integer_match

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "arithmetic_prepare", EXAMPLES / "arithmetic" / "prepare.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_held_out_problems_are_never_trained_on(example: ModuleType) -> None:
    settings = example.Settings(engine="reference", seed=0)
    train, held_out = example.make_problems(settings)
    assert (len(train), len(held_out)) == (10_000 - 256, 256)
    assert not set(train) & set(held_out)
    assert example.make_problems(settings) == (train, held_out)


def test_a_trained_answer_earns_the_reward(example: ModuleType) -> None:
    tokenizer = example.make_tokenizer()
    problem = example.Problem(9, 95)
    batch = example.make_batch([problem], tokenizer)
    prompt = encode_prompt(tokenizer, problem.prompt)
    ids = batch.input_ids.tolist()
    assert ids[: len(prompt)] == prompt
    assert batch.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    reward = TextReward(integer_match, tokenizer)
    assert reward(prompt, ids[len(prompt) :], {"answer": problem.answer}) == 1.0
    assert reward(prompt, ids[len(prompt) : -2], {"answer": problem.answer}) == 0.0


def test_prepare_writes_what_the_recipe_reads_and_only_once(example: ModuleType, tmp_path: Path) -> None:
    settings = example.Settings(engine="reference", seed=0, batch_size=4, max_steps=2)
    console = Console(file=io.StringIO(), width=500)
    example.prepare(settings, tmp_path, console)
    overrides = [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl",
        f"data.eval={tmp_path}/eval.jsonl",
    ]
    recipe = load_recipe(EXAMPLES / "grpo_arithmetic.yaml", overrides)
    assert recipe.output_dir == "runs/arithmetic/fsdp-seed0"
    assert len(read_jsonl(Path(recipe.data.eval))) == settings.held_out
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path)
    assert model.config.vocab_size == len(tokenizer) == 15
    assert model.config.eos_token_id == tokenizer.eos_token_id

    written = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    example.prepare(settings, tmp_path, console)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == written
    assert isinstance(console.file, io.StringIO)
    assert "is prepared already" in console.file.getvalue()
    assert json.loads((tmp_path / "prepared.json").read_text())["settings"]["engine"] == "reference"
