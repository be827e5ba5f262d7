"""The arithmetic example: its problems, its tokenizer, and its recipe."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import ModuleType

import arithmetic_support as support
import pytest
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import core_rl_trainer
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl_trainer import load_recipe
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import encode_prompt
from core_rl_trainer.data.sources import open_source
from core_rl_trainer.rewards.functions import load_callable
from core_rl_trainer.rewards.text import TextReward, integer_match
from core_rl_trainer.workflows.episodes import MultiTurnWorkflow

EXAMPLES = support.EXAMPLES


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return support.load_example()


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
    prompt = encode_prompt(ChatFormat(tokenizer=tokenizer), problem.prompt)
    ids = batch.input_ids.tolist()
    assert ids[: len(prompt)] == prompt
    assert batch.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    reward = TextReward(integer_match, tokenizer)
    assert reward(prompt, ids[len(prompt) :], {"answer": problem.answer}) == 1.0
    assert reward(prompt, ids[len(prompt) : -2], {"answer": problem.answer}) == 0.0


def test_calculator_makes_warm_up_transcripts(example: ModuleType) -> None:
    """Played by an engine that writes the text of the warm-up: the tokens and their mask are the same."""
    calculator = load_callable(
        "rollout.environment", f"{EXAMPLES}/arithmetic/prepare.py:calculator_environment"
    )
    tokenizer, problem = example.make_tokenizer(tool=True), example.Problem(9, 95)
    expected = example.make_batch([problem], tokenizer, [True])
    written = [text for text, trained in problem.turns(True) if trained]

    class Scripted:
        async def agenerate(self, request: LLMRequest) -> LLMResponse:
            ids = tuple(tokenizer(written.pop(0), add_special_tokens=False)["input_ids"])
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=ids,
                logprobs=(0.0,) * len(ids),
                versions=(0,) * len(ids),
                stop_reason="stop",
            )

    workflow = MultiTurnWorkflow(
        environment=lambda: calculator(tokenizer), reward=TextReward(integer_match, tokenizer)
    )
    data = {
        "prompt_ids": encode_prompt(ChatFormat(tokenizer=tokenizer), problem.prompt),
        "answer": problem.answer,
    }
    batch = asyncio.run(workflow.arun_episode(Scripted(), data, 0))
    assert batch is not None
    assert batch.input_ids.tolist() == expected.input_ids.tolist()
    assert batch.loss_mask.tolist() == expected.loss_mask.tolist()
    assert (batch["rewards"].tolist(), batch["turns"].tolist()) == ([1.0], [2])


@pytest.mark.parametrize(
    ("answer", "reply"), [("068", None), ("?23+45", ":068="), ("?23+", ":="), ("?1+2+3", ":="), ("", None)]
)
def test_the_calculator_replies_to_questions_alone(answer: str, reply: str | None) -> None:
    calculator = load_callable("tool", f"{EXAMPLES}/arithmetic/prepare.py:calculator")
    assert calculator(answer, {}) == reply


RECIPES = {
    "grpo": ("train", "eval", ["rollout.prompts_per_step=4"]),
    "ppo": ("train", "eval", ["rollout.prompts_per_step=4"]),
    "sft": ("train", "eval", ["data.batch_size=8"]),
    "reward": ("pairs", "eval_pairs", ["data.batch_size=8"]),
    "dpo": ("pairs", "eval_pairs", ["data.batch_size=8"]),
    "tool": (
        "train",
        "eval",
        [
            "rollout.prompts_per_step=4",
            f"rollout.environment={EXAMPLES}/arithmetic/prepare.py:calculator_environment",
        ],
    ),
}


OF_LIBRARIES = {"verifiers.yaml"}
"""`test_integrations` plays its environment."""
OF_IMAGES = {"sft_shapes.yaml", "grpo_shapes.yaml"}
"""`test_image_runs` runs them."""


def test_every_recipe_without_a_server_is_run_below() -> None:
    recipes = {path.name: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob("*.yaml")}
    engines = {name: recipe.get("rollout", {}).get("engine") for name, recipe in recipes.items()}
    local = {name for name, engine in engines.items() if engine in (None, "reference-rollout")}
    assert local == {f"{name}_arithmetic.yaml" for name in RECIPES} | OF_LIBRARIES | OF_IMAGES


@pytest.fixture(scope="module")
def short_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `prepare`, with a model that is hardly warmed up, and a few examples; the calculator in ``tool``."""
    directory = tmp_path_factory.mktemp("start")
    for tool, output in ((False, directory), (True, directory / "tool")):
        support.make_start(output, tool=tool, batch_size=4, max_steps=2)
    return directory


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_runs_to_its_end_in_short(short_start: Path, tmp_path: Path, name: str) -> None:
    train, held_out, smaller = RECIPES[name]
    start = short_start / "tool" if name == "tool" else short_start
    overrides = [
        "engine=reference",
        f"model.path={start}/model",
        f"data.train={start}/{train}.jsonl",
        f"data.eval={start}/{held_out}.jsonl",
        f"output_dir={tmp_path}/out",
        "optimizer.schedule.warmup_steps=1",
        "steps=2",
        *smaller,
    ]
    result = core_rl_trainer.train(support.recipe_of(name), overrides, console=Console(file=io.StringIO()))
    assert result["steps"] == 2
    assert Path(result["model"], "model.safetensors").is_file()


def test_prepare_writes_recipe_inputs_once(example: ModuleType, tmp_path: Path) -> None:
    settings = example.Settings(engine="reference", seed=0, batch_size=4, max_steps=2)
    console = Console(file=io.StringIO(), width=500)
    example.prepare(settings, tmp_path, console)
    overrides = [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl",
        f"data.eval={tmp_path}/eval.jsonl",
    ]
    recipe = load_recipe(support.recipe_of("grpo"), overrides)
    assert recipe.output_dir == str(Path("runs/arithmetic/fsdp-seed0").absolute())
    assert recipe.data.eval is not None
    assert len(open_source(recipe.data.eval[0])) == settings.held_out
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
