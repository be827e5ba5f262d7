"""The command ``core-rl init``: recipes for every algorithm, and refused input."""

from __future__ import annotations

from pathlib import Path

import pytest
import training_support as support
import yaml

from core_rl.cli import main
from core_rl_trainer.algorithms.interface import BUILT_IN
from core_rl_trainer.recipe.recipe import load_recipe

TRAINED = sorted(set(BUILT_IN) - {"ppo_critic"})
DATA = {"sft": "train.jsonl", "dpo": "pairs.jsonl", "reward_model": "pairs.jsonl"}


def arguments(start: Path, algorithm: str, **changes: str | None) -> list[str]:
    options: dict[str, str | None] = {
        "algorithm": algorithm,
        "model": str(start / "model"),
        "data": str(start / DATA.get(algorithm, "train.jsonl")),
        "reward": None if algorithm in DATA else str(start / "reward.py"),
        "engine": "reference",
    }
    options |= changes
    return ["init", *(word for name, value in options.items() if value for word in (f"--{name}", value))]


def run_command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


@pytest.mark.parametrize("algorithm", TRAINED)
def test_init_recipe_of_every_algorithm_is_valid(
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments(start, algorithm)) == 0
    recipe = load_recipe("recipe.yaml")
    assert recipe.algorithm.type_ == algorithm and recipe.data.batch_size == 16
    assert yaml.safe_load(Path("recipe.yaml").read_text())["optimizer"]["lr"] == recipe.optimizer.lr
    if algorithm not in DATA:
        assert recipe.reward == f"{start}/reward.py:even_digits"
        assert recipe.rollout.max_new_tokens == 16  # half of the model's context
    commands = [line.partition("#")[0].split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert commands == [
        ["core-rl", "train", "recipe.yaml", "--dry-run"],
        ["core-rl", "train", "recipe.yaml"],
        ["python", "-m", "webbrowser", f"{tmp_path}/runs/{algorithm}-reference-seed0/index.html"],
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]


def test_an_existing_recipe_is_kept_without_force(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "new" / "a recipe.yaml"
    words = arguments(start, "sft", output=str(output), eval=str(start / "eval.jsonl"))
    assert run_command(words) == 0
    assert f"core-rl train '{output}'" in capsys.readouterr().out
    assert [source.path for source in load_recipe(output).data.eval or ()] == [str(start / "eval.jsonl")]
    output.write_text("mine")
    assert run_command(words) == 2
    assert capsys.readouterr().err == (
        f"error: {output} exists; --force overwrites it, --output FILE writes another one\n"
    )
    assert output.read_text() == "mine"
    assert run_command([*words, "--force"]) == 0
    assert load_recipe(output).algorithm.type_ == "sft"


def test_init_writes_renamed_columns(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"my question": f"{number}+1=", "solution": "1"} for number in range(40)]
    support.write_jsonl(tmp_path / "other.jsonl", rows)
    words = arguments(start, "grpo", data="other.jsonl", reward="text_match")
    assert run_command(words) == 2
    assert "data.columns.prompt=COLUMN (as --column FIELD=COLUMN)" in capsys.readouterr().err
    assert run_command([*words, "--column", "prompt=my question", "--column", "answer=solution"]) == 0
    assert load_recipe("recipe.yaml").data.columns == {"prompt": "my question", "answer": "solution"}


BAD = [
    ("gropo", {}, "there is no interface 'gropo'; did you mean 'grpo'?"),
    ("grpo", {"reward": None}, "--algorithm grpo learns from rewards: add --reward"),
    (
        "sft",
        {"reward": "text_match"},
        "--algorithm sft trains on data and reads no reward; leave --reward out",
    ),
    ("grpo", {"reward": "none.py"}, "--reward none.py: the file cannot be read"),
    ("grpo", {"reward": "two.py"}, "name one function of the file, two.py:FUNCTION; it has: one, other"),
    ("grpo", {"reward": "two.py:onee"}, "has no attribute 'onee'; did you mean 'one'?"),
    ("grpo", {"model": "none"}, "--model = 'none': no such directory"),
    ("grpo", {"data": "none.jsonl"}, "none.jsonl': there is no such file"),
    ("grpo", {"engine": "fsdpp"}, "fsdp"),
    ("grpo", {"column": "prompt"}, "--column prompt: write FIELD=COLUMN, such as --column prompt=question"),
]


@pytest.mark.parametrize(("algorithm", "changes", "message"), BAD)
def test_init_errors_write_nothing(
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    changes: dict[str, str | None],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.py").write_text(
        "def one(completion, sample): ...\ndef _helper(): ...\nasync def other(): ...\n"
    )
    assert run_command(arguments(start, algorithm, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("recipe.yaml").exists()
