"""Workflows: how one sample of the data becomes sequences to train on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import ConfigError, RolloutError
from core_rl.rollout.rewards import RewardFn, compute_reward
from core_rl.rollout.types import LLMRequest, LLMResponse, SamplingParams

__all__ = ["RolloutWorkflow", "SingleTurnWorkflow", "TokenGenerator", "derive_seed", "pack_responses"]


class TokenGenerator(Protocol):
    """What a workflow needs of an engine."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt."""
        ...


class RolloutWorkflow(Protocol):
    """Runs one episode. It knows nothing of queues, versions or other episodes: the executor does."""

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample, or None to reject it.

        ``episode`` numbers the samples of a run in the order of submission, also after a resume: the
        source of seeds and of the numbers of groups.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SingleTurnWorkflow:
    """One prompt, ``group_size`` independent answers, one reward for each.

    ``data`` holds ``prompt_ids`` and whatever the reward function reads. The result has the fields of
    `pack_responses`, ``rewards`` (float32 ``[B]``) and ``group`` (int64 ``[B]``, the episode's number).
    An episode with an aborted answer is rejected.
    """

    reward: RewardFn
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """With a ``seed``, each answer gets a seed of its own, derived from it, the episode and its place."""
    group_size: int = 1
    """How many answers; their rewards are compared with each other (GRPO)."""
    reward_timeout_s: float | None = None
    """How long the reward of one answer may take, in seconds."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"SingleTurnWorkflow.group_size = {self.group_size}; it must be at least 1")

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """Generate and score the group. Raises `RolloutError` that names the episode and the answer."""
        if "prompt_ids" not in data:
            raise RolloutError(f"sample {episode} has no 'prompt_ids'; it has {sorted(data)}")
        prompt = tuple(int(token) for token in data["prompt_ids"])
        answers = [
            asyncio.ensure_future(self._answer(engine, prompt, data, episode, member))
            for member in range(self.group_size)
        ]
        try:
            scored = await asyncio.gather(*answers)
        finally:
            for answer in answers:  # those that still run, when one has failed
                answer.cancel()
        responses = [response for response, _ in scored]
        if any(response.stop_reason == "abort" for response in responses):
            return None
        return pack_responses(responses).with_sequences(
            rewards=torch.tensor([reward for _, reward in scored], dtype=torch.float32),
            group=torch.full((self.group_size,), episode, dtype=torch.long),
        )

    async def _answer(
        self,
        engine: TokenGenerator,
        prompt: tuple[int, ...],
        data: Mapping[str, Any],
        episode: int,
        member: int,
    ) -> tuple[LLMResponse, float]:
        seed = self.sampling.seed
        sampling = (
            self.sampling if seed is None else replace(self.sampling, seed=derive_seed(seed, episode, member))
        )
        response = await engine.agenerate(LLMRequest(input_ids=prompt, sampling=sampling))
        if response.stop_reason == "abort":
            return response, 0.0
        subject = f"sample {episode}, answer {member}"
        reward = await compute_reward(
            self.reward, prompt, response.output_ids, data, subject=subject, timeout_s=self.reward_timeout_s
        )
        return response, reward


def derive_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2**63) that depends on all arguments, and on nothing else."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def pack_responses(responses: Sequence[LLMResponse]) -> SequenceBatch:
    """Prompt and answer of each response as one sequence, token ids as they were.

    Token fields: ``loss_mask`` (bool; the answer, its stop token included), ``logprobs`` (float32; those
    of the rollout, 0 in the prompt) and ``versions`` (int64; -1 in the prompt). Meta: ``stop_reason``.
    """

    def aligned(response: LLMResponse, values: Sequence[float], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([*[fill] * len(response.input_ids), *values], dtype=dtype)

    return SequenceBatch.from_sequences(
        [r.input_ids + r.output_ids for r in responses],
        tokens={
            "loss_mask": [aligned(r, [1] * len(r.output_ids), 0, torch.bool) for r in responses],
            "logprobs": [aligned(r, r.logprobs, 0.0, torch.float32) for r in responses],
            "versions": [aligned(r, r.versions, -1, torch.long) for r in responses],
        },
        meta={"stop_reason": [r.stop_reason for r in responses]},
    )
