"""Advantages of groups of completions from their rewards, as papers define them, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev, stdev
from typing import get_args

from core_rl_oracle.loss_names import AdvantageRule


def group_advantages(rule: AdvantageRule, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """The advantage of each completion; ``groups`` are the numbers of their prompts.

    The deviation is that of a sample, with ``n - 1``, as TRL and verl compute it.
    """
    members = {
        group: [r for r, other in zip(rewards, groups, strict=True) if other == group] for group in groups
    }
    return [_advantage(rule, reward, members[group]) for reward, group in zip(rewards, groups, strict=True)]


def _advantage(rule: AdvantageRule, reward: float, group: Sequence[float]) -> float:
    centred = reward - fmean(group)
    match rule:
        case "dr_grpo":
            return centred
        case "rloo":
            return centred * len(group) / (len(group) - 1)
        case "grpo":
            deviation = stdev(group)
            return centred / deviation if deviation else 0.0


def mistaken_advantages(
    rule: AdvantageRule, rewards: Sequence[float], groups: Sequence[int]
) -> Iterator[tuple[str, list[float]]]:
    """Sentences about usual mistakes, and the advantages of each."""
    for other in get_args(AdvantageRule):
        if other != rule:
            yield f"advantages follow the rule {other}", group_advantages(other, rewards, groups)
    mean, deviation = fmean(rewards), pstdev(rewards)
    yield "the baseline is the mean of the batch, not of the group", [reward - mean for reward in rewards]
    yield (
        "rewards are whitened over the batch, not over the group",
        [(reward - mean) / deviation for reward in rewards],
    )
    yield "rewards are taken as advantages", list(rewards)
