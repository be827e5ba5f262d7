"""Errors in a recipe, in data or in rewards: named, before anything starts where that is possible."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from training_support import run

from core_rl.errors import BatchError, ConfigError, RolloutError
from core_rl_trainer.errors import NothingLearned

REWARDS = """
import time


def constant(answer, sample):
    return 0.5


def nan_of_one(answer, sample):
    return float("nan") if sample["prompt"] == "2+3=" else float(len(answer))


def leaves(answer, sample):
    exec("exit(3)")


async def blocks(answer, sample):
    time.sleep(600)
"""
GRPO = {"type": "grpo"}


@pytest.fixture(scope="module")
def start(start: Path) -> Path:
    (start / "rewards.py").write_text(REWARDS)
    return start


# ------------------------------------------------------------------ in the middle of a run


def test_nonfinite_reward_names_prompt(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path / "out", reward=f"{start}/rewards.py:nan_of_one", steps=9)
    with pytest.raises(RolloutError, match=r"prompt '2\+3=': .*nan_of_one returned nan; rewards are finite"):
        run(values)
    assert "nan_of_one returned nan" in (tmp_path / "out" / "index.html").read_text()


def test_equal_rewards_warn_once_or_end_run(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = f"{start}/rewards.py:constant"
    values = support.recipe_values(
        start,
        tmp_path / "out",
        reward=reward,
        algorithm=GRPO,
        steps=9,
        save_every=9,
        stop_on={"no_signal": 4},
    )
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            NothingLearned, match=r"step 4, stop_on.no_signal: .*The last good checkpoint is that of step 4"
        ),
    ):
        run(values)
    assert (
        caplog.text.count("step 3: the completions of each prompt all have the same reward (0.5 on average)")
        == 1
    )
    rows = support.curve(tmp_path / "out")[1:]
    assert [(row["advantage_max"], row["grad_norm"]) for row in rows] == [(0, 0)] * 4
    assert "stop_on.no_signal" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.nightly
def test_filter_rejecting_everything_ends_run(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(
        start, tmp_path / "out", reward=f"{start}/rewards.py:constant", algorithm=GRPO
    )
    values["rollout"] |= {
        "should_accept": "core_rl_trainer.rewards.functions:rewards_differ",
        "timeout_s": 6.0,
        "reward_timeout_s": 1.0,
    }
    with pytest.raises(
        RolloutError, match=r"6 of 6 episodes are missing after 7 s.*; \d+ were rejected so far"
    ):
        run(values)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("leaves", r"the reward function leaves raised SystemExit: 3 \(rewards.py:\d+\)"),
        ("blocks", r"the reward function blocks gave no result in 3 s \(rewards.py:\d+\)"),
    ],
)
def test_exiting_or_blocking_reward_prints_two_lines(
    start: Path, tmp_path: Path, reward: str, cause: str
) -> None:
    values = support.recipe_values(start, tmp_path / "out", reward=f"{start}/rewards.py:{reward}")
    values["rollout"] |= {"reward_timeout_s": 3.0}
    recipe = support.write_recipe(tmp_path / "r.yaml", values)
    command = [sys.executable, "-m", "core_rl.cli", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 1
    *_, first, second = done.stderr.strip().splitlines()
    assert re.search(rf"^error: .*prompt '.*': sample \d+, completion \d: {cause}$", first), done.stderr
    assert second.startswith("fix: ")
    assert "asyncio" not in done.stderr
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------- before it


def _rows(directory: Path, *rows: dict[str, Any]) -> str:
    path = directory / "rows.jsonl"
    support.write_jsonl(path, rows)
    return str(path)


CHAT = {"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}
LONG = {"prompt": "1+" * 20 + "=", "answer": 20}


@pytest.mark.parametrize(
    ("rows", "which", "message"),
    [
        (
            (CHAT,),
            "train",
            "rows.jsonl: line 1: .*no chat template, and the data has chat messages; add a chat_template",
        ),
        ((LONG,), "eval", r"rows.jsonl: line 1 has 42 tokens, longer than the 28 tokens"),
        (({"question": "1+1="},), "eval", "rows.jsonl: line 1 needs a text 'prompt'"),
        ((), "train", "rows.jsonl has no prompts"),
    ],
    ids=["no chat template", "too long", "no prompt", "empty"],
)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_bad_data_is_named_before_anything_starts(
    start: Path, tmp_path: Path, rows: tuple[dict[str, Any], ...], which: str, message: str, algorithm: str
) -> None:
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": algorithm})
    values["data"] |= {which: _rows(tmp_path, *rows)}
    if algorithm == "sft":
        message = message.replace("prompts", "examples").replace("42", "45").replace("28", "32")
    with pytest.raises((BatchError, ConfigError), match=message):
        run(values)
    assert not (tmp_path / "out").exists()
