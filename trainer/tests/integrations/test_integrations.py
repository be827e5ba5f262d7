"""Environments and rewards of other libraries: verifiers, math-verify and reasoning-gym."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from transformers import PreTrainedTokenizerFast

from core_rl.errors import ConfigError, RolloutError
from core_rl_trainer.environments import Observation
from core_rl_trainer.integrations.verifiers import VerifiersEnvironment, verifiers_examples
from core_rl_trainer.rewards.functions import load_callable

EXAMPLES = Path(__file__).parents[3] / "examples"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}</s>="
    "{% else %}+{{ m['content'] }}={% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return support.make_tokenizer()


async def played(
    environment: Any, data: dict[str, Any], completions: Sequence[Sequence[int]]
) -> list[Observation]:
    await environment.reset(data)
    observations = [await environment.step(completion) for completion in completions]
    await environment.close()
    return observations


def guess(tokenizer: Any) -> VerifiersEnvironment:
    make = load_callable("rollout.environment", f"{EXAMPLES}/verifiers/guess.py:guess_environment")
    return make(tokenizer)  # type: ignore[no-any-return]


def test_rubric_is_summed_at_episode_end(tokenizer: PreTrainedTokenizerFast) -> None:
    (row,) = verifiers_examples([{"question": "2+3=", "answer": "005"}])
    data = row | {"prompt_ids": tokenizer("2+3=")["input_ids"]}
    right, wrong = (tokenizer.encode(text, add_special_tokens=False) for text in ("5", "4"))
    assert asyncio.run(played(guess(tokenizer), data, [right])) == [Observation(done=True, reward=1.1)]
    first, second = asyncio.run(played(guess(tokenizer), data, [wrong, right]))
    assert first == Observation(ids=tuple(tokenizer.encode("2+3=", add_special_tokens=False)))
    assert second == Observation(done=True, reward=1.0)
    assert asyncio.run(played(guess(tokenizer), data, [wrong, wrong]))[1].reward == 0.0


@pytest.mark.parametrize(("end", "reply"), [([support.EOS], "=+2+3="), ([], "</s>=+2+3=")])
def test_replies_follow_the_end_of_the_turn(end: list[int], reply: str) -> None:
    tokenizer = support.make_tokenizer(TEMPLATE)
    data = {"prompt": [{"role": "user", "content": "2+3"}], "answer": "5", "prompt_ids": []}
    drawn = [*tokenizer.encode("4", add_special_tokens=False), *end]
    (observation,) = asyncio.run(played(guess(tokenizer), data, [drawn]))
    assert tokenizer.decode(list(observation.ids)) == reply


@pytest.mark.parametrize("values", [(None, 2.0), (None, None), ()])
def test_rewards_of_none_are_left_out(
    tokenizer: PreTrainedTokenizerFast, values: tuple[float | None, ...]
) -> None:
    data = {"prompt": "2+3=", "answer": "5", "prompt_ids": [5]}
    environment = guess(tokenizer)
    rubric = environment._environment.rubric
    rubric.funcs, rubric.weights = [lambda value=value: value for value in values], [0.5] * len(values)
    episode = played(environment, data, [tokenizer.encode("5", add_special_tokens=False)])
    if values == (None, None):
        with pytest.raises(RolloutError, match="no reward applies"):
            asyncio.run(episode)
    else:
        assert asyncio.run(episode)[-1].reward == len(values) / 2


def test_failing_rubric_names_function(tokenizer: PreTrainedTokenizerFast) -> None:
    data = {"prompt": "2+3=", "answer": "five", "prompt_ids": [5]}
    with pytest.raises((RolloutError, ValueError), match="five"):
        asyncio.run(played(guess(tokenizer), data, [[5], [5]]))


def test_gym_tasks_score_their_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    example = EXAMPLES / "gym_tasks.py"
    printed = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True).stdout
    score = load_callable("reward", f"{example}:task_score")
    for row in map(json.loads, printed.splitlines()[:5]):
        answer = row["answer"]
        assert [score(text, row) for text in (answer, f"<answer>{answer}</answer>", "?")] == [1.0, 1.0, 0.0]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1),
        ("The answer is 7", 7, 1),
        ("The answer is 8", 7, 0),
        ("$x^2+1$", "1+x^2", 1),
        ("", "3", 0),
        (r"\boxed{5}", "It costs 5 dollars", 1),
        (r"\boxed{5 dollars}", "5 dollars", 1),
        (r"\boxed{3}", "Therefore x = 3", 1),
        ("1000", "1e3", 1),
        (r"\boxed{4}", "3 red and 4 blue", 0),
        (" B\n", ["A", "B"], 1),
        ("C", "B", 0),
    ],
)
def test_math_verify_compares_expressions(completion: str, answer: Any, reward: float) -> None:
    from core_rl_trainer.rewards.math import math_verify

    # In a thread, as rewards run.
    assert asyncio.run(asyncio.to_thread(math_verify, completion, {"answer": answer})) == reward


def test_missing_library_error_names_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "core_rl_trainer.rewards.math", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "core-rl-trainer\[math\]"'):
        load_callable("reward", "core_rl_trainer.rewards.math:math_verify")
