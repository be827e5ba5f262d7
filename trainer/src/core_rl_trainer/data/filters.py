"""Filters: which answers are worth training on."""

from __future__ import annotations

from core_rl.data.batch import SequenceBatch

__all__ = ["rewards_differ"]


def rewards_differ(batch: SequenceBatch) -> bool:
    """Whether not all rewards of the group are equal: equal ones have no advantage over each other."""
    rewards = batch["rewards"]
    return bool((rewards != rewards[0]).any())
