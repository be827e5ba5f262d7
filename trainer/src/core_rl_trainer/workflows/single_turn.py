"""Single-turn rollouts: one prompt, several completions, one reward for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.errors import ConfigError, RolloutError
from core_rl.rollout.workflow import RolloutWorkflow, TokenGenerator, generate_whole, pack_responses
from core_rl.seeds import derive_seed
from core_rl_trainer.rewards.calls import gather_group
from core_rl_trainer.rewards.functions import RewardFn
from core_rl_trainer.rewards.terms import GroupScorer, Reward, WeightedRewards, reward_fields

__all__ = ["GreedyBaselineWorkflow", "SingleTurnWorkflow"]


@dataclass(frozen=True, kw_only=True)
class SingleTurnWorkflow:
    """One prompt, ``group_size`` independent completions, one reward for each.

    ``data`` holds ``prompt_ids`` and whatever the reward function reads. The result has the fields of
    `pack_responses`, ``rewards`` (float32 ``[B]``) and ``group`` (int64 ``[B]``, the episode's number).
    A completion that the engine aborts is continued; see `generate_whole`.
    """

    reward: RewardFn | WeightedRewards
    """Several have fields of their own: see `reward_fields`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """With a ``seed``, each completion gets a seed of its own, derived from it, the episode and its number."""
    group_size: int = 1
    """The number of completions; their rewards are compared with each other (GRPO)."""
    reward_timeout_s: float | None = None
    """The time limit of the reward of one completion, in seconds."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"SingleTurnWorkflow.group_size = {self.group_size}; it must be at least 1")

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """Generate and score the group. Raises `RolloutError` that names the episode and the completion."""
        if "prompt_ids" not in data:
            raise RolloutError(f"sample {episode} has no 'prompt_ids'; it has {sorted(data)}")
        prompt = tuple(int(token) for token in data["prompt_ids"])
        scorer = GroupScorer(
            self.reward,
            data,
            size=self.group_size,
            subject=f"sample {episode}",
            timeout_s=self.reward_timeout_s,
        )
        scored = await gather_group(
            self._generate(engine, prompt, scorer, episode, member) for member in range(self.group_size)
        )
        return pack_responses([response for response, _ in scored]).with_sequences(
            group=torch.full((self.group_size,), episode, dtype=torch.long),
            **reward_fields([reward for _, reward in scored]),
        )

    async def _generate(
        self,
        engine: TokenGenerator,
        prompt: tuple[int, ...],
        scorer: GroupScorer,
        episode: int,
        member: int,
    ) -> tuple[LLMResponse, Reward]:
        seed = self.sampling.seed
        sampling = (
            self.sampling if seed is None else replace(self.sampling, seed=derive_seed(seed, episode, member))
        )
        response = await generate_whole(engine, LLMRequest(input_ids=prompt, sampling=sampling))
        return response, await scorer.score(member, prompt, response.output_ids)


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
