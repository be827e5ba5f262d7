"""Advantages from rewards, over the whole batch and before any split of it."""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError

__all__ = ["group_advantages", "spread_to_tokens"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, as verl does: equal rewards give advantages of 0, not 0/0."""


def group_advantages(rewards: Tensor, group: Tensor, *, by_std: bool = True) -> Tensor:
    """GRPO's advantages (arXiv:2402.03300, section 4.1.2): each reward against the others of its group.

    ``rewards [B]`` and integer ``group [B]`` give float32 ``[B]``: reward minus the group's mean,
    divided by the group's sample standard deviation unless ``by_std`` is false (Dr. GRPO,
    arXiv:2503.20783). A group of one, or of equal rewards, has advantage 0. Raises `BatchError`
    for wrong shapes and for rewards that are not finite, naming the sequences.
    """
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise BatchError(f"'rewards' {list(rewards.shape)} and 'group' {list(group.shape)} must both be [B]")
    wrong = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if wrong:
        raise BatchError(
            f"the reward of sequence {wrong[0]} is {float(rewards[wrong[0]])} ({len(wrong)} of {len(rewards)} "
            "are not finite); make the reward function return finite numbers"
        )
    values = rewards.double()
    _, owner = torch.unique(group, return_inverse=True)
    counts = torch.bincount(owner).double()
    zeros = torch.zeros_like(counts)
    centred = values - (zeros.index_add(0, owner, values) / counts)[owner]
    if not by_std:
        return centred.float()
    variance = zeros.index_add(0, owner, centred.square()) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt()[owner] + STD_FLOOR)).float()


def spread_to_tokens(values: Tensor, batch: SequenceBatch) -> Tensor:
    """Sequence values ``[B]`` as token values ``[T]``: each token gets its sequence's."""
    lengths = torch.tensor(batch.lengths, device=values.device)
    return torch.repeat_interleave(values, lengths)
