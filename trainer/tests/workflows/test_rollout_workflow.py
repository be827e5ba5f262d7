"""Single-turn episodes: requests, batches, and how a reward function may fail."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_support import ToyBackend, eventually, toy_config, toy_spec
from workflow_support import Echo

from core_rl.data.requests import LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import ConfigError, RolloutError
from core_rl.rollout.workflow import pack_responses
from core_rl.seeds import derive_seed
from core_rl_trainer.rewards.functions import RewardFn
from core_rl_trainer.workflows.episodes import SingleTurnWorkflow


def by_length(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    return float(len(prompt_ids) * 100 + len(output_ids) * 10 + data["bonus"])


async def by_length_later(
    prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]
) -> float:
    await asyncio.sleep(0)
    return by_length(prompt_ids, output_ids, data)


class CallableReward:
    async def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]
    ) -> float:
        return by_length(prompt_ids, output_ids, data)


def returns_awaitable(
    prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]
) -> Awaitable[float]:
    return by_length_later(prompt_ids, output_ids, data)


SAMPLE = {"prompt_ids": [7, 8, 9], "bonus": 1}


@pytest.mark.parametrize("reward", [by_length, by_length_later, CallableReward(), returns_awaitable])
def test_an_episode_holds_prompts_answers_and_rewards(reward: RewardFn) -> None:
    workflow = SingleTurnWorkflow(reward=reward, group_size=2)
    batch = asyncio.run(workflow.arun_episode(Echo(), SAMPLE, 5))
    assert batch is not None
    assert batch.lengths == [5, 5]
    assert batch.input_ids.tolist() == [7, 8, 9, 7, 8] * 2
    assert batch.tokens["loss_mask"].tolist() == [False, False, False, True, True] * 2
    assert batch.tokens["loss_mask"].dtype == torch.bool
    torch.testing.assert_close(batch["logprobs"], torch.tensor([0, 0, 0, -0.5, -1.5] * 2))
    assert batch["versions"].tolist() == [-1, -1, -1, 3, 4] * 2
    assert batch["versions"].dtype == torch.long
    torch.testing.assert_close(batch["rewards"], torch.tensor([321.0, 321.0]))
    assert batch["group"].tolist() == [5, 5]
    assert batch.meta == {"stop_reason": ["stop", "stop"]}
    assert batch.unit is None


def test_group_runs_concurrently_with_separate_seeds() -> None:
    echo = Echo()
    workflow = SingleTurnWorkflow(reward=by_length, group_size=4, sampling=SamplingParams(seed=11))
    for episode in (0, 1):
        asyncio.run(workflow.arun_episode(echo, SAMPLE, episode))
    seeds = [request.sampling.seed for request in echo.requests]
    assert echo.most_running == 4
    assert seeds == [derive_seed(11, episode, member) for episode in (0, 1) for member in range(4)]
    assert len(set(seeds)) == 8


def test_without_a_seed_the_engine_chooses() -> None:
    echo = Echo()
    asyncio.run(SingleTurnWorkflow(reward=by_length).arun_episode(echo, SAMPLE, 0))
    assert echo.requests[0].sampling.seed is None


def test_an_aborted_answer_goes_on() -> None:
    workflow = SingleTurnWorkflow(reward=by_length, group_size=2)
    batch = asyncio.run(workflow.arun_episode(Echo("abort"), SAMPLE, 0))
    assert batch is not None
    assert batch.lengths == [7, 5]
    assert batch["loss_mask"].sum() == 6
    assert batch.meta == {"stop_reason": ["stop", "stop"]}


def test_a_sample_without_a_prompt_is_named() -> None:
    with pytest.raises(RolloutError, match=r"sample 3 has no 'prompt_ids'; it has \['answer'\]"):
        asyncio.run(SingleTurnWorkflow(reward=by_length).arun_episode(Echo(), {"answer": 1}, 3))


def test_a_group_has_a_member() -> None:
    with pytest.raises(ConfigError, match="group_size = 0"):
        SingleTurnWorkflow(reward=by_length, group_size=0)


def raises(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    raise KeyError("answer")


def gives_up(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    raise TimeoutError("its own")


def gives(value: Any) -> RewardFn:
    def constant(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> Any:
        return value

    return constant


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, "the reward function raises raised KeyError: 'answer'"),
        (gives_up, "the reward function gives_up raised TimeoutError: its own"),
        (gives(math.nan), "the reward function constant returned nan"),
        (gives("much"), "the reward function constant returned 'much', not a number"),
        (gives(None), "no reward applies: None was returned by constant"),
        (
            gives([1.0]),
            r"the reward function constant returned \[1.0\], not a number[\s\S]*or set 'batched: true'",
        ),
    ],
)
def test_failing_reward_names_sample(reward: RewardFn, message: str) -> None:
    workflow = SingleTurnWorkflow(reward=reward, reward_timeout_s=60)
    with pytest.raises(RolloutError, match=f"sample 12, completion 0: {message}"):
        asyncio.run(workflow.arun_episode(Echo(), SAMPLE, 12))


def test_hanging_reward_times_out() -> None:
    async def sleep(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
        await asyncio.sleep(60)
        return 0.0

    workflow = SingleTurnWorkflow(reward=sleep, reward_timeout_s=0.05)
    with pytest.raises(RolloutError, match=r"sample 0, completion 0: .* gave no result in 0\.05 s"):
        asyncio.run(workflow.arun_episode(Echo(), SAMPLE, 0))


@given(st.integers(0, 2**63 - 1), st.lists(st.tuples(st.integers(0, 999), st.integers(0, 99)), unique=True))
def test_seeds_differ_and_stay_in_range(seed: int, paths: list[tuple[int, int]]) -> None:
    seeds = {derive_seed(seed, *path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= derived < 2**63 for derived in seeds)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_packed_ragged_responses_keep_token_values(shapes: list[tuple[int, int]]) -> None:
    responses = [
        LLMResponse(
            rid="r",
            input_ids=tuple(range(prompt)),
            output_ids=tuple(range(10, 10 + count)),
            logprobs=tuple(-0.5 * (i + 1) for i in range(count)),
            versions=tuple(range(count)),
            stop_reason="abort",
        )
        for prompt, count in shapes
    ]
    batch = pack_responses(responses)
    for index, (prompt, count) in enumerate(shapes):
        one = batch.select([index])
        assert one.input_ids.tolist() == [*range(prompt), *range(10, 10 + count)]
        assert one["loss_mask"].tolist() == [False] * prompt + [True] * count
        assert one["versions"].tolist() == [-1] * prompt + list(range(count))
        assert one["logprobs"].tolist() == [0.0] * prompt + [-0.5 * (i + 1) for i in range(count)]
        assert one["logprobs"].dtype == torch.float32


# ------------------------------------------------------------- with an engine


def sum_of(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    return float(sum(output_ids))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "core-rl" in thread.name]


def test_hanging_reward_ends_only_rollout() -> None:
    engine = InferenceEngine(toy_spec(), toy_config(), ToyBackend())
    engine.initialize()
    free = threading.Event()

    def hang(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
        free.wait(60)
        return 0.0

    data = [{"prompt_ids": [30]}]
    with pytest.raises(RolloutError, match=r"1 of 1 samples have no result after 1 s"):
        engine.rollout(
            data, SingleTurnWorkflow(reward=hang, sampling=SamplingParams(max_new_tokens=3)), timeout=1
        )
    assert (
        engine.rollout(
            data, SingleTurnWorkflow(reward=sum_of, sampling=SamplingParams(max_new_tokens=3)), timeout=60
        ).num_sequences
        == 1
    )
    engine.destroy()
    eventually(lambda: our_threads() == ["core-rl-user-code"])
    free.set()
    eventually(lambda: our_threads() == [])
