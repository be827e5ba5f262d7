"""Episodes of several turns: whose tokens are whose, when they end, and how an environment may fail."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_support import make_tokenizer

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams, StopReason
from core_rl.errors import ConfigError, RolloutError
from core_rl.rollout.workflow import MAX_ABORTS, generate_whole
from core_rl.seeds import derive_seed
from core_rl_trainer.environments import Observation
from core_rl_trainer.rewards.config import RewardSection
from core_rl_trainer.rewards.terms import RewardTerm, WeightedRewards
from core_rl_trainer.workflows.episodes import MultiTurnWorkflow
from core_rl_trainer.workflows.user_code import LoadedCode, check_environment, load_user_code, open_user_code

STOP = 9


class Counter:
    """Draws the numbers 100, 101, … in turn, ``per_answer`` at a time, each as a new version and log-prob."""

    def __init__(self, per_answer: int = 2, abort_after: Sequence[int] = ()) -> None:
        self.requests: list[LLMRequest] = []
        self._per_answer = per_answer
        self._abort_after = list(abort_after)
        """Tokens before each of the first aborts."""
        self._next = 100

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        await asyncio.sleep(0)
        aborted = bool(self._abort_after)
        length = self._abort_after.pop(0) if aborted else self._per_answer
        count = min(length, request.sampling.max_new_tokens)
        first, self._next = self._next, self._next + count
        reason: StopReason = "abort" if aborted else "length" if count < self._per_answer else "stop"
        return LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=tuple(range(first, first + count)),
            logprobs=tuple(-float(n) for n in range(first, first + count)),
            versions=tuple(range(first, first + count)),
            stop_reason=reason,
            latency_s=1.0,
        )


class Script:
    """Answers with the observations of ``data["script"]`` in turn; records the completions."""

    made: ClassVar[list[Script]] = []

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.closed = 0
        Script.made.append(self)

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        self._script = list(data["script"])
        return list(data["prompt_ids"])

    async def step(self, output_ids: Sequence[int]) -> Observation:
        self.seen.append(tuple(output_ids))
        observation = self._script.pop(0)
        if isinstance(observation, Exception):
            raise observation
        if observation == "hang":
            await asyncio.sleep(60)
        return observation  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def made() -> list[Script]:
    Script.made = []
    return Script.made


def says(*ids: int, reward: float = 0.0) -> Observation:
    return Observation(ids=ids, reward=reward)


DONE = Observation(done=True, reward=1.0)
TALK = {"prompt_ids": [1, 2], "script": [says(50, 51, reward=0.25), says(), DONE]}


def play(workflow: MultiTurnWorkflow, data: Mapping[str, Any], engine: Counter, episode: int = 3) -> Any:
    return asyncio.run(workflow.arun_episode(engine, data, episode))


def test_transcript_trains_only_generated_tokens(made: list[Script]) -> None:
    engine = Counter()
    batch = play(MultiTurnWorkflow(environment=Script), TALK, engine)
    assert batch.input_ids.tolist() == [1, 2, 100, 101, 50, 51, 102, 103, 104, 105]
    assert batch["loss_mask"].tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 4
    drawn = [100, 101, 102, 103, 104, 105]
    assert batch["logprobs"][batch.loss_mask].tolist() == [-float(n) for n in drawn]
    assert batch["versions"].tolist() == [-1, -1, 100, 101, -1, -1, 102, 103, 104, 105]
    assert float(batch["logprobs"][~batch.loss_mask].abs().sum()) == 0
    assert (batch["rewards"].tolist(), batch["turns"].tolist(), batch["group"].tolist()) == ([1.25], [3], [3])
    assert batch.meta == {"stop_reason": ["stop"]}
    assert made[0].seen == [(100, 101), (102, 103), (104, 105)]
    assert [request.input_ids for request in engine.requests] == [
        (1, 2), (1, 2, 100, 101, 50, 51), (1, 2, 100, 101, 50, 51, 102, 103)
    ]  # fmt: skip
    assert made[0].closed == 1


def test_group_members_have_separate_environments_and_seeds(made: list[Script]) -> None:
    engine = Counter()
    workflow = MultiTurnWorkflow(environment=Script, group_size=3, sampling=SamplingParams(seed=5))
    batch = play(workflow, TALK, engine)
    assert batch.num_sequences == len(made) == 3
    assert batch["group"].tolist() == [3, 3, 3]
    expected = {derive_seed(5, 3, member, turn) for member in range(3) for turn in range(3)}
    assert {request.sampling.seed for request in engine.requests} == expected


@pytest.mark.parametrize(
    ("settings", "tokens", "turns", "reward"),
    [
        ({"max_turns": 1}, [1, 2, 100, 101], 1, 0.25),
        ({"max_turns": 2}, [1, 2, 100, 101, 50, 51, 102, 103], 2, 0.25),
        ({"max_tokens": 6}, [1, 2, 100, 101], 1, 0.25),
        ({"max_tokens": 7}, [1, 2, 100, 101, 50, 51, 102], 2, 0.25),
        ({"max_tokens": 8}, [1, 2, 100, 101, 50, 51, 102, 103], 2, 0.25),
        ({"max_tokens": 3}, [1, 2, 100], 1, 0.0),
    ],
)
def test_an_episode_without_turns_or_room_is_cut(
    made: list[Script], settings: dict[str, Any], tokens: list[int], turns: int, reward: float
) -> None:
    batch = play(MultiTurnWorkflow(environment=Script, **settings), TALK, Counter())
    assert batch.input_ids.tolist() == tokens
    assert batch.meta == {"stop_reason": ["length"]}
    assert (batch["turns"].tolist(), batch["rewards"].tolist()) == ([turns], [reward])
    assert made[0].closed == 1


def last_token(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    assert list(prompt_ids) == data["prompt_ids"]
    return float(output_ids[-1])


def last_tokens(prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], data: Any) -> list[float]:
    return [last_token(prompt_ids, output_ids, data) for output_ids in completions]


@pytest.mark.parametrize(
    "reward",
    [last_token, WeightedRewards((RewardTerm(name="last", function=last_tokens, batched=True),))],
    ids=["single", "batched"],
)
def test_a_reward_function_scores_the_last_response(reward: Any) -> None:
    batch = play(MultiTurnWorkflow(environment=Script, reward=reward), TALK, Counter())
    assert batch["rewards"].tolist() == [105 + 1.25]
    assert batch["reward/environment"].tolist() == [1.25]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([KeyError("tool")], "turn 0: the environment Script raised KeyError: 'tool'"),
        ([says(), ValueError("no")], "turn 1: the environment Script raised ValueError: no"),
        (["hang"], "turn 0: the environment Script gave no result in 0.1 s"),
        ([(1, 2)], r"turn 0: the environment Script returned (1, 2); step() returns an Observation"),
        ([Observation(ids="5")], r"turn 0: the environment Script returned ('5',) as token ids"),  # type: ignore[arg-type]
        ([says(65.5)], r"turn 0: the environment Script returned (65.5,) as token ids"),  # type: ignore[arg-type]
        (
            [says(50, 1000)],
            "turn 0: the environment Script returned the token id 1000, and the model has 0 to 999",
        ),
        ([says(-1)], "turn 0: the environment Script returned the token id -1, and the model has"),
        ([says(reward=math.nan)], "turn 0: the environment Script returned nan; rewards are finite"),
    ],
)
def test_failing_environment_names_sample_and_turn(
    made: list[Script], script: list[Any], message: str
) -> None:
    workflow = MultiTurnWorkflow(environment=Script, step_timeout_s=0.1, group_size=2, vocabulary=1000)
    with pytest.raises(RolloutError, match=rf"sample 3, completion [01], {re.escape(message)}") as error:
        play(workflow, {"prompt_ids": [1], "script": script}, Counter())
    assert "return a reward" not in str(error.value)
    assert [environment.closed for environment in made] == [1, 1]


METHODS = "".join(f"    async def {name}(self, *args): ...\n" for name in ("reset", "step"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def made(completion, sample): ...",
            r"takes \(completion, sample\): .*ToolEnvironment\(tokenizer, tool\)",
        ),
        ("async def made(tokenizer): ...", "is a coroutine function; write it as a plain one"),
        (f"class made:\n{METHODS}", r"takes \(\): too many positional arguments"),
        (
            f"class made:\n    def __init__(self, tokenizer): ...\n{METHODS}",
            "a class without `async def` of close",
        ),
        (
            f"class made:\n    def __init__(self, t): ...\n{METHODS}    def close(self): ...",
            "a class without `async def` of close; write",
        ),
    ],
)
def test_environments_of_another_form_are_refused(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "made.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"^rollout\.environment = .*made' .*{message}"):
        load_user_code({}, f"{tmp_path / 'made.py'}:made", None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{}['host']", r"made raised KeyError: 'host' \(made\.py:4\)"),
        ("exit(3)", r"made raised SystemExit: 3 \(made\.py:4\)"),
        ("__import__('time').sleep(2)", r"made is not made in 0\.2 s; raise rollout\.step_timeout_s"),
        ("self.reset = len", r"made: is a made without `async def` of reset; write it so"),
        ("__import__('asyncio').get_running_loop()", None),
    ],
)
def test_environments_are_made_before_the_run(tmp_path: Path, body: str, message: str | None) -> None:
    base = "from core_rl_trainer.environments import ToolEnvironment as Base\nclass made(Base):\n"
    (tmp_path / "made.py").write_text(f"{base}    def __init__(self, tokenizer):\n        {body}\n")
    make = load_user_code({}, f"{tmp_path / 'made.py'}:made", None).environment
    assert make is not None
    refusal = (
        pytest.raises(ConfigError, match=f"^rollout\\.environment: {message}$") if message else nullcontext()
    )
    with refusal:
        check_environment(make, make_tokenizer(), 0.2)


@pytest.mark.parametrize("code", ["class score: ...", "def score(text, sample):\n    yield 1.0"])
def test_rewards_without_a_number_are_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "score.py").write_text(code)
    section = RewardSection(function=f"{tmp_path / 'score.py'}:score")
    with pytest.raises(ConfigError, match="returns an object or a generator, no number"):
        load_user_code({"reward": section}, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("solution_str, ground_truth, method='strict'", "it would get the sample as 'ground_truth'"),
        ("prompts, completions, **columns", "it would get the sample as 'completions'"),
        ("completions, **columns", "too many positional arguments"),
        ("data_source, solution_str, ground_truth", "missing a required argument: 'ground_truth'"),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_rewards_of_other_arguments_are_refused(
    tmp_path: Path, arguments: str, message: str, batched: bool
) -> None:
    (tmp_path / "score.py").write_text(f"def score({arguments}): return 1.0")
    section = RewardSection(function=f"{tmp_path / 'score.py'}:score", batched=batched)
    with pytest.raises(ConfigError, match=f"{message}; a reward is called with .* and its sample, so wrap"):
        load_user_code({"reward": section}, None, None)


def test_a_prompt_without_room_names_the_sample() -> None:
    with pytest.raises(
        RolloutError, match="sample 3: a prompt of 2 tokens leaves no room for a completion in 2"
    ):
        play(MultiTurnWorkflow(environment=Script, max_tokens=2), TALK, Counter())


def test_settings_out_of_range_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)group_size = 0.*max_turns = 0"):
        MultiTurnWorkflow(environment=Script, group_size=0, max_turns=0)


# ------------------------------------------------------------ answers after an abort


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(1, 12), st.sampled_from([None, 7]))
def test_an_aborted_answer_goes_on_from_its_tokens(aborts: list[int], limit: int, seed: int | None) -> None:
    engine = Counter(per_answer=3, abort_after=aborts)
    request = LLMRequest(input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=limit, seed=seed))
    response = asyncio.run(generate_whole(engine, request))
    count = min(sum(aborts) + 3, limit)
    drawn = tuple(range(100, 100 + count))
    assert (response.rid, response.input_ids, response.output_ids) == (request.rid, (1, 2), drawn)
    assert response.versions == drawn
    assert response.logprobs == tuple(-float(n) for n in drawn)
    assert response.stop_reason == ("stop" if sum(aborts) + 3 <= limit else "length")
    assert response.latency_s == len(engine.requests)
    assert len({sent.rid for sent in engine.requests}) == len(engine.requests)
    for sent in engine.requests:
        assert len(sent.input_ids) + sent.sampling.max_new_tokens == 2 + limit


def test_aborted_penalised_completion_starts_again() -> None:
    engine = Counter(per_answer=3, abort_after=[2])
    sampling = SamplingParams(max_new_tokens=5, presence_penalty=1.0)
    response = asyncio.run(generate_whole(engine, LLMRequest(input_ids=(1, 2), sampling=sampling)))
    assert response.output_ids == (102, 103, 104)
    assert [request.input_ids for request in engine.requests] == [(1, 2)] * 2


def test_engine_with_only_aborts_raises() -> None:
    engine = Counter(abort_after=[1] + [0] * MAX_ABORTS)
    with pytest.raises(RolloutError, match="was aborted 8 times in a row without a new token"):
        asyncio.run(generate_whole(engine, LLMRequest(input_ids=(1,))))


def test_aborts_do_not_show_in_an_episode(made: list[Script]) -> None:
    plain = play(MultiTurnWorkflow(environment=Script), TALK, Counter())
    aborted = play(MultiTurnWorkflow(environment=Script), TALK, Counter(abort_after=[0, 1]))
    assert aborted["loss_mask"].sum() == plain["loss_mask"].sum() + 1
    torch.testing.assert_close(aborted["rewards"], plain["rewards"])


class LoopNames:
    """An environment that notes the thread of each call, in which a tool runs as well."""

    threads: ClassVar[set[str]] = set()

    def __init__(self, tokenizer: Any) -> None:
        self.note()

    def note(self) -> None:
        asyncio.get_running_loop()
        self.threads.add(threading.current_thread().name)

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        self.note()
        return [1]

    async def step(self, output_ids: Sequence[int]) -> Observation:
        self.note()
        return Observation(done=True, reward=1.0)

    async def close(self) -> None:
        self.note()


async def noted_reward(completion: str, sample: Mapping[str, Any]) -> float:
    LoopNames.threads.add(threading.current_thread().name)
    return 1.0


def test_environments_and_rewards_share_a_loop() -> None:
    section = RewardSection(function=f"{__name__}:noted_reward")
    loaded = LoadedCode(
        sections=(section,), rewards={section.call: noted_reward}, environment=LoopNames, should_accept=None
    )
    settings: Any = {"reward_processes": 0, "reward_timeout_s": None, "skip_special_tokens": True}
    with open_user_code(loaded, make_tokenizer(), **settings) as user:
        assert user.environment is not None
        workflow = MultiTurnWorkflow(environment=user.environment, reward=user.reward)
        assert play(workflow, {}, Counter())["rewards"].tolist() == [2.0]
    assert LoopNames.threads == {"core-rl-rewards"}
