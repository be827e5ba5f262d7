"""Rollout workflows: completions of a prompt, a greedy baseline, and episodes of several turns."""

from __future__ import annotations

import asyncio
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.errors import ConfigError, RolloutError, raise_all
from core_rl.rollout.workflow import RolloutWorkflow, TokenGenerator, Transcript, generate_whole
from core_rl.seeds import derive_seed
from core_rl_trainer.data.kinds import media_of
from core_rl_trainer.data.plain import shown
from core_rl_trainer.environments import Environment, Observation
from core_rl_trainer.rewards.calls import gather_group, guarded, name_of
from core_rl_trainer.rewards.functions import RewardFn, as_reward
from core_rl_trainer.rewards.terms import GroupScorer, Reward, WeightedRewards, reward_fields


@dataclass(frozen=True, kw_only=True)
class GroupWorkflow(ABC):
    """``group_size`` independent sequences from one sample, with a reward for each."""

    reward: RewardFn | WeightedRewards | None
    """Several have fields of their own: see `reward_fields`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """With a ``seed``, each completion gets a seed of its own, derived from it, the episode, its number and turn."""
    group_size: int = 1
    """The number of sequences; their rewards are compared with each other (GRPO)."""
    reward_timeout_s: float | None = None
    """Time limit of the reward of one sequence, in seconds."""

    def __post_init__(self) -> None:
        counts = {name: value for name, value in vars(self).items() if name in ("group_size", "max_turns")}
        wrong = [f"{name} = {count}; it must be at least 1" for name, count in counts.items() if count < 1]
        raise_all(ConfigError, type(self).__name__, wrong)

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """Generate and score the group. Raises `RolloutError` that names the episode, the completion and the turn."""
        scorer = GroupScorer(
            self.reward or WeightedRewards(()),
            data,
            size=self.group_size,
            subject=f"sample {episode}",
            timeout_s=self.reward_timeout_s,
        )
        scored = await gather_group(
            self._scored(engine, data, scorer, (episode, member)) for member in range(self.group_size)
        )
        return self._packed([transcript for transcript, _ in scored]).with_sequences(
            group=torch.full((self.group_size,), episode, dtype=torch.long),
            **reward_fields([reward for _, reward in scored]),
        )

    @abstractmethod
    async def _scored(
        self, engine: TokenGenerator, data: Mapping[str, Any], scorer: GroupScorer, position: tuple[int, int]
    ) -> tuple[Transcript, Reward]:
        """One sequence and its reward; ``position`` is the number of the episode, and of the sequence in it."""

    def _packed(self, transcripts: Sequence[Transcript]) -> SequenceBatch:
        return Transcript.pack(transcripts)

    def _seeded(self, *position: int) -> SamplingParams:
        """The sampling of one completion."""
        seed = self.sampling.seed
        return self.sampling if seed is None else self.sampling.with_seed(derive_seed(seed, *position))


@dataclass(frozen=True, kw_only=True)
class SingleTurnWorkflow(GroupWorkflow):
    """One prompt, ``group_size`` independent completions, one reward for each.

    ``data`` holds ``prompt_ids``, `MEDIA` of one sequence where the prompt has images, and whatever the reward function
    reads. The result has the fields of `Transcript.pack`, ``rewards`` (float32 ``[B]``) and ``group`` (int64 ``[B]``,
    the episode's number). A completion that the engine aborts is continued; see `generate_whole`.
    """

    reward: RewardFn | WeightedRewards

    async def _scored(
        self, engine: TokenGenerator, data: Mapping[str, Any], scorer: GroupScorer, position: tuple[int, int]
    ) -> tuple[Transcript, Reward]:
        if "prompt_ids" not in data:
            raise RolloutError(f"sample {position[0]} has no 'prompt_ids'; it has {sorted(data)}")
        transcript = Transcript([int(token) for token in data["prompt_ids"]], media_of(data, 1)[0])
        ids, media = transcript.ids, transcript.media
        request = LLMRequest(input_ids=ids, sampling=self._seeded(*position), media=media)
        transcript.add_response(await generate_whole(engine, request))
        return transcript, await scorer.score(position[1], ids, transcript.last_response)


@dataclass(frozen=True, kw_only=True)
class GreedyBaselineWorkflow:
    """The sequences of ``sampled``, each with the reward of ``greedy`` as ``baseline_rewards [B]``.

    ReMax (arXiv:2310.10505) compares with the greedy completion of the same weights. A sample is rejected
    when either workflow rejects it.
    """

    sampled: RolloutWorkflow
    greedy: RolloutWorkflow
    """Makes one sequence."""

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample; the greedy one is not among them."""
        batch, baseline = await asyncio.gather(
            self.sampled.arun_episode(engine, data, episode), self.greedy.arun_episode(engine, data, episode)
        )
        if batch is None or baseline is None:
            return None
        return batch.with_sequences(
            baseline_rewards=baseline["rewards"][:1].expand(batch.num_sequences).clone()
        )


@dataclass(frozen=True, kw_only=True)
class MultiTurnWorkflow(GroupWorkflow):
    """``group_size`` independent episodes from one sample, each with an environment of its own.

    The model completes the prompt; the environment's tokens follow, and the model continues after them. It ends when
    the environment is done, a completion is cut off, or there is no turn or room left. The result has the fields of
    `Transcript.pack`, ``rewards`` (float32 ``[B]``), ``group`` (int64 ``[B]``, the episode's number) and ``turns``
    (int64 ``[B]``, completions). Tokens are the drawn tokens and the environment's, whose ``loss_mask`` is 0.
    """

    environment: Callable[[], Environment]
    """Makes the environment of one episode."""
    reward: RewardFn | WeightedRewards | None = None
    """Scores the last completion, in addition to the environment's own rewards."""
    max_turns: int = 8
    """The most completions of one episode."""
    max_tokens: int | None = None
    """The most tokens of one episode, such as the engine's context; None leaves it to the engine to refuse."""
    vocabulary: int = 2**31
    """Token ids of the model are below this."""
    step_timeout_s: float | None = None
    """Time limit of one call of the environment, in seconds."""

    def _packed(self, transcripts: Sequence[Transcript]) -> SequenceBatch:
        turns = torch.tensor([transcript.turns for transcript in transcripts])
        return super()._packed(transcripts).with_sequences(turns=turns)

    async def _scored(
        self, engine: TokenGenerator, data: Mapping[str, Any], scorer: GroupScorer, position: tuple[int, int]
    ) -> tuple[Transcript, Reward]:
        subject = f"sample {position[0]}, completion {position[1]}"
        environment = self.environment()
        try:
            prompt = await self._call(environment, environment.reset(data), f"{subject}: reset of")
            prompt = self._token_ids(prompt, f"{subject}: reset of the environment {name_of(environment)}")
            transcript = Transcript(prompt, media_of(data, 1)[0])
            earned = await self._turns(engine, environment, transcript, position)
            reward = await scorer.score(position[1], prompt, transcript.last_response, earned)
        finally:
            await self._call(environment, environment.close(), f"{subject}: close of")
        return transcript, reward

    async def _turns(
        self,
        engine: TokenGenerator,
        environment: Environment,
        transcript: Transcript,
        position: tuple[int, int],
    ) -> float:
        """Fill ``transcript``; the sum of the environment's rewards."""
        total = 0.0
        for turn in range(self.max_turns):
            response = await self._generate(engine, transcript, (*position, turn))
            transcript.add_response(response)
            if response.stop_reason == "length":  # half a message is nothing that an environment understands
                return total
            subject = f"sample {position[0]}, completion {position[1]}, turn {turn}:"
            observation = await self._call(environment, environment.step(response.output_ids), subject)
            subject += f" the environment {name_of(environment)}"
            if not isinstance(observation, Observation):
                raise RolloutError(f"{subject} returned {observation!r}; step() returns an Observation")
            total += as_reward(observation.reward, subject)
            ids = self._token_ids(observation.ids, subject)
            if observation.done:
                return total
            room = self.max_tokens is None or len(transcript) + len(ids) < self.max_tokens
            if turn + 1 == self.max_turns or not room:
                transcript.stop_reason = "length"
                return total
            transcript.add_environment(ids)
        raise AssertionError("max_turns is at least 1")

    async def _generate(
        self, engine: TokenGenerator, transcript: Transcript, position: tuple[int, int, int]
    ) -> LLMResponse:
        sampling = self._seeded(*position)
        if self.max_tokens is not None:
            room = self.max_tokens - len(transcript)
            if room < 1:
                raise RolloutError(
                    f"sample {position[0]}: a prompt of {len(transcript)} tokens leaves no room for a completion in "
                    f"{self.max_tokens}; shorten it or leave it out"
                )
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        request = LLMRequest(input_ids=transcript.ids, sampling=sampling, media=transcript.media)
        return await generate_whole(engine, request)

    async def _call(self, environment: Environment, awaited: Any, subject: str) -> Any:
        full_subject = f"{subject} the environment {name_of(environment)}"
        return await guarded(
            awaited,
            subject=full_subject,
            timeout_s=self.step_timeout_s,
            function=getattr(environment, "__wrapped__", type(environment).step),
            setting="rollout.step_timeout_s",
        )

    def _token_ids(self, ids: Iterable[Any], subject: str) -> list[int]:
        """``ids`` as integers, or a `RolloutError` that begins with ``subject``."""
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise RolloutError(
                f"{subject} returned {shown(ids)} as token ids\n"
                "fix: return whole numbers; continuation_ids() of core_rl_trainer.environments encodes a text"
            ) from error
        if wrong := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise RolloutError(
                f"{subject} returned the token id {wrong[0]}, and the model has 0 to {self.vocabulary - 1:,}\n"
                "fix: encode with its tokenizer"
            )
        return tokens
