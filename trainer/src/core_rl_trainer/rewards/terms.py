"""Rewards that are sums of several weighted ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import RolloutError
from core_rl_trainer.rewards.calls import gather_group, name_of, place_of
from core_rl_trainer.rewards.config import ENVIRONMENT
from core_rl_trainer.rewards.functions import (
    BatchedRewardFn,
    RewardFn,
    as_reward,
    compute_reward,
    compute_rewards,
)

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
    terms: Mapping[str, float | None] = field(default_factory=dict)
    """The named rewards, before their weights; None for a reward that does not apply."""


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
        self._size = size
        self._completions: dict[int, Sequence[int]] = {}
        loop = asyncio.get_running_loop()
        self._batched: dict[str, asyncio.Future[list[float | None]]] = {
            term.name: loop.create_future() for term in self._terms if term.batched
        }

    async def score(
        self, member: int, prompt_ids: Sequence[int], output_ids: Sequence[int], earned: float | None = None
    ) -> Reward:
        """The reward of completion ``member``, once batched functions have scored all of them.

        Rewards that do not apply are left out of the sum. ``earned`` is an environment's reward, which is added.
        Raises as `compute_reward` does, whose time limit is that of each call, and where no reward applies.
        """
        self._completions[member] = output_ids
        last = len(self._completions) == self._size
        values = await gather_group(self._value(term, member, prompt_ids, last) for term in self._terms)
        pairs = list(zip(self._terms, values, strict=True))
        subject = f"{self._subject}, completion {member}: "
        if earned is None and all(value is None for value in values):
            names = ", ".join(f"{name_of(term.function)}{place_of(term.function)}" for term in self._terms)
            raise RolloutError(
                f"{subject}no reward applies: None was returned by {names}\n"
                "fix: return a number from any, or leave the example out"
            )
        total = sum(term.weight * value for term, value in pairs if value is not None) + (earned or 0.0)
        terms = {} if earned is None else {ENVIRONMENT: earned}
        return Reward(
            total=as_reward(total, f"{subject}the weighted sum of the rewards"),
            terms=terms | {term.name: value for term, value in pairs if term.name},
        )

    async def _value(
        self, term: RewardTerm, member: int, prompt_ids: Sequence[int], last: bool
    ) -> float | None:
        """The value of ``term`` for a completion; the ``last`` completion of the sample calls batched functions."""
        data, timeout_s = self._data, self._timeout_s
        if not term.batched:
            function, output_ids = cast("RewardFn", term.function), self._completions[member]
            subject = f"{self._subject}, completion {member}"
            return await compute_reward(
                function, prompt_ids, output_ids, data, subject=subject, timeout_s=timeout_s
            )
        rewards = self._batched[term.name]
        if last:
            batched = cast("BatchedRewardFn", term.function)
            completions = [self._completions[number] for number in range(self._size)]
            values = await compute_rewards(
                batched, prompt_ids, completions, data, subject=self._subject, timeout_s=timeout_s
            )
            rewards.set_result(values)
        return (await rewards)[member]


def reward_fields(rewards: Sequence[Reward]) -> dict[str, Tensor]:
    """Sequence fields of a batch, float32 ``[B]``: ``rewards``, and ``reward/NAME`` for each term.

    NaN stands for a term that does not apply to a sequence.
    """
    fields = {"rewards": torch.tensor([reward.total for reward in rewards], dtype=torch.float32)}
    for name in rewards[0].terms:
        values = [reward.terms[name] for reward in rewards]
        filled = [math.nan if value is None else value for value in values]
        fields[f"{TERM}{name}"] = torch.tensor(filled, dtype=torch.float32)
    return fields


def reward_metrics(batch: SequenceBatch, prefix: str = "") -> dict[str, float]:
    """The mean of each term over the sequences that it applies to, as the metric ``reward/NAME`` after ``prefix``.

    A term that applies to none is left out.
    """
    return {
        f"{prefix}{name}": float(values.double().nanmean())
        for name, values in batch.sequences.items()
        if name.startswith(TERM) and not bool(values.isnan().all())
    }
