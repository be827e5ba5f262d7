"""Several weighted rewards: the recipe's section, the sum, and a field of the batch and a metric for each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import training_support as support
from workflow_support import Echo

from core_rl.data.requests import SamplingParams
from core_rl.errors import ConfigError, RolloutError, UnsupportedCapability
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.recipe.recipe import load_recipe
from core_rl_trainer.rewards.terms import RewardTerm, WeightedRewards, reward_metrics
from core_rl_trainer.workflows.episodes import SingleTurnWorkflow


def length(prompt_ids: Any, output_ids: Any, data: Any) -> float:
    return len(output_ids)


async def first(prompt_ids: Any, output_ids: Any, data: Any) -> float:
    return float(output_ids[0] % 2)


def wrong(prompt_ids: Any, output_ids: Any, data: Any) -> float:
    raise ValueError("no")


def test_terms_are_weighted_and_logged() -> None:
    terms = (
        RewardTerm(name="length", function=length, weight=0.5),
        RewardTerm(name="odd", function=first, weight=-1.0),
    )
    workflow = SingleTurnWorkflow(
        reward=WeightedRewards(terms),
        sampling=SamplingParams(max_new_tokens=3, ignore_eos=True),
        group_size=2,
    )
    batch = asyncio.run(workflow.arun_episode(Echo(), {"prompt_ids": [5, 6]}, 0))
    assert batch is not None
    lengths, odd = batch["reward/length"], batch["reward/odd"]
    torch.testing.assert_close(batch["rewards"], 0.5 * lengths - odd)
    assert reward_metrics(batch, "eval_") == {
        "eval_reward/length": float(lengths.mean()),
        "eval_reward/odd": float(odd.mean()),
    }


def test_failing_term_is_named() -> None:
    terms = tuple(RewardTerm(name=f.__name__, function=f) for f in (length, wrong))
    workflow = SingleTurnWorkflow(reward=WeightedRewards(terms), sampling=SamplingParams(max_new_tokens=3))
    with pytest.raises(
        RolloutError, match=r"the reward function wrong raised ValueError: no \(test_reward_terms.py"
    ):
        asyncio.run(workflow.arun_episode(Echo(), {"prompt_ids": [5, 6]}, 0))


class Batched:
    """A batched reward, called with ``calls``; returns ``value`` or the position of each completion."""

    def __init__(self, value: Any = None) -> None:
        self.calls: list[Any] = []
        self._value = value

    def __call__(self, prompt_ids: Any, completions: Any, data: Any) -> Any:
        self.calls.append((list(prompt_ids), [list(ids) for ids in completions]))
        return list(range(len(completions))) if self._value is None else self._value


def batched_workflow(reward: Any) -> SingleTurnWorkflow:
    terms = (
        RewardTerm(name="length", function=length, weight=0.5),
        RewardTerm(name="position", function=reward, weight=-1.0, batched=True),
    )
    return SingleTurnWorkflow(reward=WeightedRewards(terms), group_size=3)


@pytest.mark.parametrize("value", [None, (0, 1, 2), torch.tensor([0, 1, 2])])
def test_batched_rewards_score_a_group_at_once(value: Any) -> None:
    reward = Batched(value)
    batch = asyncio.run(batched_workflow(reward).arun_episode(Echo(), {"prompt_ids": [5, 6]}, 0))
    assert batch is not None
    assert batch["reward/position"].tolist() == [0, 1, 2]
    torch.testing.assert_close(batch["rewards"], 0.5 * batch["reward/length"] - batch["reward/position"])
    assert reward.calls == [([5, 6], [[5, 6]] * 3)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], r"returned a list of length 2 for 3 completions.*\nfix: return a list"),
        (0.5, "returned 0.5, not a list of 3 numbers"),
        ("abc", "returned 'abc', not a list of 3 numbers"),
        ({"a": 1.0}, "returned {.a.: 1.0}, not a list of 3 numbers"),
        ([1.0, "2", 2.0], "for completion 1, returned '2', not a number"),
        ([1.0, 2.0, float("nan")], "for completion 2, returned nan; rewards are finite"),
    ],
)
def test_wrong_batched_rewards_are_refused(value: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=f"(?s)sample 4: the reward function Batched,? {message}"):
        asyncio.run(batched_workflow(Batched(value)).arun_episode(Echo(), {"prompt_ids": [5, 6]}, 4))


def test_rewards_that_do_not_apply_are_left_out() -> None:
    batch = asyncio.run(
        batched_workflow(Batched([None, 1, 2])).arun_episode(Echo(), {"prompt_ids": [5, 6]}, 0)
    )
    assert batch is not None
    lengths = batch["reward/length"].tolist()
    assert batch["rewards"].tolist() == [0.5 * lengths[0], 0.5 * lengths[1] - 1, 0.5 * lengths[2] - 2]
    assert reward_metrics(batch)["reward/position"] == 1.5


def test_no_applicable_reward_is_an_error() -> None:
    def no_reward(prompt_ids: Any, output_ids: Any, data: Any) -> None: ...

    workflow = SingleTurnWorkflow(reward=WeightedRewards((RewardTerm(name="none", function=no_reward),)))
    with pytest.raises(RolloutError, match="completion 0: no reward applies: None was returned by no_reward"):
        asyncio.run(workflow.arun_episode(Echo(), {"prompt_ids": [5, 6]}, 0))


REWARD = "core_rl_trainer.rewards.text:text_match"
MODULE = "core_rl_trainer.rewards.text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": REWARD, "rewards": [{"function": REWARD}]}, "both 'reward' and 'rewards' are set"),
        (
            {"reward": None, "rewards": [{"function": REWARD}] * 2},
            "2 rewards are called 'text_match'; give each",
        ),
        ({"reward": None, "rewards": [{"function": REWARD, "weight": ".nan"}]}, "rewards.0.weight"),
        (
            {"reward": None, "rewards": [{"function": f"{MODULE}:text_math"}]},
            "rewards.0.function = .*did you mean 'text_match'",
        ),
        ({"reward": None}, "reward = null needs"),
    ],
)
def test_invalid_rewards_are_named(
    start: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = support.write_recipe(
        tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out", **changes)
    )
    with pytest.raises(ConfigError, match=message):
        resolve(load_recipe(recipe))


def test_a_written_recipe_can_be_read_again(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(
        start, tmp_path / "out", rewards=[{"function": REWARD}, {"function": "http://host/score/"}]
    )
    del values["reward"]
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    assert [section.label for section in recipe.rewards] == ["text_match", "score"]
    assert (
        load_recipe(support.write_recipe(tmp_path / "again.yaml", recipe.model_dump(mode="json"))) == recipe
    )


# ------------------------------------------------------------------ sampling


UNSUPPORTED_SAMPLING = [
    (
        {"top_p": 0.9},
        ConfigError,
        r"with top_p = 0.9 completions come from another distribution .*\nfix: leave",
    ),
    ({"logit_bias": {5: 2.0}, "min_p": 0.1}, ConfigError, r"min_p = 0.1, logit_bias = \(\(5, 2.0\),\)"),
    ({"stop": [""]}, ConfigError, "stop has an empty text"),
    ({"stop": ["="], "engine": "sglang"}, UnsupportedCapability, "'sglang' does not declare 'stop_strings'"),
    ({"n": 8}, ConfigError, "unknown field 'rollout.n'"),
]


@pytest.mark.parametrize(("rollout", "error", "message"), UNSUPPORTED_SAMPLING)
def test_unsupported_sampling_is_refused(
    start: Path, tmp_path: Path, rollout: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = support.recipe_values(start, tmp_path / "out")
    values["rollout"] |= rollout
    with pytest.raises(error, match=message):
        resolve(load_recipe(support.write_recipe(tmp_path / "r.yaml", values)))


def test_changed_distributions_warn(start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = support.recipe_values(start, tmp_path / "out")
    values["rollout"] |= {"repetition_penalty": 1.1, "off_distribution": "warn", "stop_token_ids": [4]}
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    resolve(recipe)
    assert "repetition_penalty = 1.1 completions come from another distribution" in caplog.text
    assert recipe.rollout.sampling().stop_token_ids == (4,)
