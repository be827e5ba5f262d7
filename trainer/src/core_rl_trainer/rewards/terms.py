"""Rewards that are sums of several weighted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.rewards.calls import gather_group
from core_rl_trainer.rewards.functions import RewardFn, compute_reward

__all__ = [
    "TERM",
    "Reward",
    "RewardTerm",
    "WeightedRewards",
    "reward_fields",
    "reward_metrics",
    "score_completion",
]

TERM = "reward/"
"""The beginning of the field of a batch, and of the metric, that hold one term of the rewards."""


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """A named reward."""

    name: str
    """Of its metric, ``reward/NAME``."""
    function: RewardFn
    weight: float = 1.0


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


async def score_completion(
    reward: RewardFn | WeightedRewards,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    data: Mapping[str, Any],
    *,
    subject: str,
    timeout_s: float | None = None,
) -> Reward:
    """The reward of one completion. Raises as `compute_reward` does, which each function gets ``timeout_s`` for."""

    async def value_of(function: RewardFn) -> float:
        return await compute_reward(
            function, prompt_ids, output_ids, data, subject=subject, timeout_s=timeout_s
        )

    if not isinstance(reward, WeightedRewards):
        return Reward(total=await value_of(reward))
    values = await gather_group(value_of(term.function) for term in reward.terms)
    pairs = list(zip(reward.terms, values, strict=True))
    return Reward(
        total=sum(term.weight * value for term, value in pairs),
        terms={term.name: value for term, value in pairs},
    )


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
