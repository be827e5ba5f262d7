"""Rewards that are sums of several weighted ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.rewards.calls import gather_group
from core_rl_trainer.rewards.functions import BatchedRewardFn, RewardFn, compute_reward, compute_rewards

__all__ = [
    "TERM",
    "GroupScorer",
    "Reward",
    "RewardTerm",
    "WeightedRewards",
    "reward_fields",
    "reward_metrics",
]

TERM = "reward/"
"""The beginning of the field of a batch, and of the metric, that hold one term of the rewards."""


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """A named reward."""

    name: str
    """Name of its metric, ``reward/NAME``."""
    function: RewardFn | BatchedRewardFn
    weight: float = 1.0
    batched: bool = False
    """Whether ``function`` is a `BatchedRewardFn`."""


@dataclass(frozen=True)
class WeightedRewards:
    """Several rewards of one completion, which are computed at the same time; what counts is their weighted sum."""

    terms: tuple[RewardTerm, ...]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of one completion."""

    total: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """The named rewards, before their weights."""


class GroupScorer:
    """Rewards of the ``size`` completions of one sample. Belongs to the running event loop."""

    def __init__(
        self,
        reward: RewardFn | WeightedRewards,
        data: Mapping[str, Any],
        *,
        size: int,
        subject: str,
        timeout_s: float | None = None,
    ) -> None:
        self._data = data
        self._subject = subject
        self._timeout_s = timeout_s
        if not isinstance(reward, WeightedRewards):
            reward = WeightedRewards((RewardTerm(name="", function=reward),))
        self._terms = reward.terms
        self._groups = {term.name: _Group(size) for term in self._terms if term.batched}

    async def score(self, member: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Reward:
        """The reward of completion ``member``, once batched functions have scored all of them.

        Raises as `compute_reward` does, whose time limit is that of each call.
        """
        values = await gather_group(self._value(term, member, prompt_ids, output_ids) for term in self._terms)
        pairs = list(zip(self._terms, values, strict=True))
        return Reward(
            total=sum(term.weight * value for term, value in pairs),
            terms={term.name: value for term, value in pairs if term.name},
        )

    async def _value(
        self, term: RewardTerm, member: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> float:
        if not term.batched:
            subject = f"{self._subject}, completion {member}"
            function = cast("RewardFn", term.function)
            return await compute_reward(
                function, prompt_ids, output_ids, self._data, subject=subject, timeout_s=self._timeout_s
            )
        group = self._groups[term.name]
        if group.add(member, output_ids):
            rewards = await compute_rewards(
                cast("BatchedRewardFn", term.function),
                prompt_ids,
                group.completions(),
                self._data,
                subject=self._subject,
                timeout_s=self._timeout_s,
            )
            group.rewards.set_result(rewards)
        return (await group.rewards)[member]


class _Group:
    """Completions that wait for a batched function, which the last of them calls."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._completions: dict[int, Sequence[int]] = {}
        self.rewards: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def add(self, member: int, output_ids: Sequence[int]) -> bool:
        """Whether the group is complete with this completion."""
        self._completions[member] = output_ids
        return len(self._completions) == self._size

    def completions(self) -> list[Sequence[int]]:
        """All completions, in the order of their numbers."""
        return [self._completions[member] for member in range(self._size)]


def reward_fields(rewards: Sequence[Reward]) -> dict[str, Tensor]:
    """Sequence fields of a batch, float32 ``[B]``: ``rewards``, and ``reward/NAME`` for each term."""
    fields = {"rewards": torch.tensor([reward.total for reward in rewards], dtype=torch.float32)}
    for name in rewards[0].terms:
        values = [reward.terms[name] for reward in rewards]
        fields[f"{TERM}{name}"] = torch.tensor(values, dtype=torch.float32)
    return fields


def reward_metrics(batch: SequenceBatch, prefix: str = "") -> dict[str, float]:
    """The mean of each term, as the metric ``reward/NAME`` after ``prefix``."""
    return {
        f"{prefix}{name}": float(values.double().mean())
        for name, values in batch.sequences.items()
        if name.startswith(TERM)
    }
