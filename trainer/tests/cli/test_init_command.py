"""The command ``core-rl init``: recipes that can run, and refused input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from core_rl.cli import main
from core_rl_trainer import load_recipe
from core_rl_trainer.api import dry_run

OPTIONAL = re.compile(r"^( *)# ([a-z]+: .*)$", re.MULTILINE)


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["init", *words])
    return int(caught.value.code or 0)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_recipes_to_begin_with_can_run(start: Path, workspace: Path, algorithm: str) -> None:
    assert run_command("--algorithm", algorithm) == 0
    paths = [f"model.path={start}/model", f"data.train={start}/train.jsonl", "rollout.max_new_tokens=8"]
    assert dry_run("recipe.yaml", [*paths, "engine=reference"]).algorithm == algorithm
    recipe = workspace / "recipe.yaml"
    recipe.write_text(OPTIONAL.sub(r"\1\2", recipe.read_text()))
    assert yaml.safe_load(recipe.read_text())["dtype"] == "bfloat16"
    assert load_recipe(recipe, paths).model.lora is not None


def test_recipe_is_never_written_over(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run_command(), run_command()] == [0, 2]
    assert capsys.readouterr().err == "error: --output recipe.yaml: File exists; name a new file\n"


BAD = [
    (["--algorithm", "dpo"], "--algorithm dpo: there are recipes for grpo and sft"),
    (["--output", "none/recipe.yaml"], "--output none/recipe.yaml: No such file or directory"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_refused_init_writes_nothing(
    workspace: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run_command(*words) == 2
    assert message in capsys.readouterr().err and not list(workspace.iterdir())
