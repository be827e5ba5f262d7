"""Whole runs on data of several sources: without an evaluation, and killed and resumed."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import training_support as support
from rich.console import Console

from core_rl_trainer import train


@pytest.fixture(scope="module")
def start(start: Path) -> Path:
    rows = [{"question": f"{n}+{n}=", "solution": str(2 * n)} for n in range(12)]
    support.write_jsonl(start / "others.jsonl", [*rows, {"question": "1+" * 30, "solution": "1"}])
    return start


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_needs_no_evaluation(start: Path, tmp_path: Path, algorithm: str) -> None:
    values = support.supervised_values(start, tmp_path / "out", "sft", eval_every=0, steps=2)
    if algorithm == "grpo":
        values = support.recipe_values(start, tmp_path / "out", eval_every=0, steps=2)
    del values["data"]["eval"]
    printed = io.StringIO()
    result = train(
        support.write_recipe(tmp_path / "r.yaml", values), console=Console(file=printed, width=200)
    )
    assert result["before"] == result["after"] == {}
    assert not any(name.startswith("eval_") for row in support.curve(tmp_path / "out") for name in row)
    assert "16 examples" in printed.getvalue() and "evaluation, " not in printed.getvalue()
    assert (tmp_path / "out" / "index.html").is_file()


def test_runs_leave_out_the_first_evaluation(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path / "out", eval_every=0, eval_first=False, steps=2)
    printed = io.StringIO()
    result = train(
        support.write_recipe(tmp_path / "r.yaml", values), console=Console(file=printed, width=200)
    )
    assert result["before"] is None and result["after"]
    assert [row["step"] for row in support.curve(tmp_path / "out")] == [1, 2]
    assert f"{result['after']['eval_reward']:.3f} after\n" in printed.getvalue()


@pytest.mark.nightly
def test_killed_mixture_resumes_identically(start: Path, tmp_path: Path) -> None:
    def recipe(name: str) -> Path:
        values = support.supervised_values(start, tmp_path / name, "sft")
        second = {
            "path": f"{start}/others.jsonl",
            "weight": 1,
            "columns": {"prompt": "question", "answer": "solution"},
        }
        values["data"] = {
            "train": [{"path": f"{start}/train.jsonl", "weight": 2}, second],
            "eval_fraction": 0.2,
            "unusable": "drop",
            "batch_size": 6,
        }
        return support.write_recipe(tmp_path / f"{name}.yaml", values)

    support.run(recipe("whole"))
    support.run_killed(["core-rl", "train", str(recipe("killed"))], tmp_path / "killed")
    assert support.curve(tmp_path / "killed") == support.curve(tmp_path / "whole")


def test_turns_with_several_prompts_are_trained(start: Path, tmp_path: Path) -> None:
    shutil.copytree(start / "model", tmp_path / "model")
    turns = "{{ messages | length }}{% for turn in messages %}={{ turn.content }}"
    end = "{% if turn.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(turns + end)
    roles = ("user", "assistant", "user", "assistant")
    chat = [{"role": role, "content": text} for role, text in zip(roles, "1234", strict=True)]
    support.write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat}] * 4)
    values = support.supervised_values(start, tmp_path / "out", "sft", steps=1, eval_every=0)
    values["model"]["path"], values["data"] = (
        str(tmp_path / "model"),
        {"train": str(tmp_path / "chats.jsonl")},
    )
    printed = io.StringIO()
    train(support.write_recipe(tmp_path / "r.yaml", values), [], console=Console(file=printed, width=200))
    assert "4 examples, 76 tokens" in printed.getvalue()
    assert "first example: <s>1=1=⟦2</s>⟧" in printed.getvalue()
    assert "first example: <s>3=1=2</s>=3=⟦4</s>⟧" in printed.getvalue()
