"""Advantages from rewards, over the whole batch and before any split of it.

The rules for whole sequences take ``rewards [B]`` and integer ``group [B]``, the prompt of each, and give
float32 ``[B]``. They raise `BatchError` for wrong shapes and for rewards that are not finite, naming the
sequence. A sequence that is alone in its group has nothing to be compared with, and advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm
from core_rl.errors import BatchError
from core_rl_trainer.algorithms.fields import check_finite

__all__ = [
    "dr_grpo_advantages",
    "grpo_advantages",
    "remax_advantages",
    "rloo_advantages",
    "spread_to_tokens",
    "whiten",
]

STD_FLOOR = 1e-6
"""Added to the standard deviation, as verl does: equal rewards give advantages of 0, not 0/0."""
VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whiten`, as verl and TRL do."""


def grpo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO (arXiv:2402.03300, section 4.1.2): reward minus the group's mean, over its sample standard deviation."""
    centred, owner, counts = _centred(rewards, group)
    variance = torch.zeros_like(counts).index_add(0, owner, centred.square()) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt()[owner] + STD_FLOOR)).float()


def dr_grpo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783): reward minus the group's mean.

    Without the division, questions that are nearly solved or nearly hopeless do not count more than others.
    """
    return _centred(rewards, group)[0].float()


def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """RLOO (arXiv:2402.14740; Kool et al. 2019): reward minus the mean of the **others** in the group."""
    centred, owner, counts = _centred(rewards, group)
    # r - (S - r) / (n - 1) = (r - S / n) * n / (n - 1)
    return (centred * (counts / (counts - 1).clamp(min=1))[owner]).float()


def remax_advantages(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """ReMax (arXiv:2310.10505): reward minus that of the greedy completion of the same prompt, both ``[B]``."""
    if rewards.dim() != 1 or rewards.shape != baseline_rewards.shape:
        raise BatchError(
            f"'rewards' {list(rewards.shape)} and 'baseline_rewards' {list(baseline_rewards.shape)} must both be [B]"
        )
    check_finite(rewards, "reward")
    check_finite(baseline_rewards, "baseline reward")
    return (rewards.double() - baseline_rewards.double()).float()


def whiten(values: Tensor, mask: Tensor, comm: Comm | None = None) -> Tensor:
    """``values [T]`` with mean 0 and variance 1 over the tokens where ``mask`` is true, and 0 elsewhere.

    Moments are float64, over the ranks of ``comm`` as well (the data-parallel ranks, each with its part of
    the batch). The variance is the sample variance, as in verl and TRL. Collective.
    """
    comm = comm or Comm()
    chosen = values[mask].double()
    total, count = comm.sum([float(chosen.sum()), float(len(chosen))])
    mean = total / max(count, 1)
    (squares,) = comm.sum([float((chosen - mean).square().sum())])
    variance = squares / max(count - 1, 1)
    white = (values.double() - mean) / (variance + VARIANCE_FLOOR) ** 0.5
    return torch.where(mask, white, 0.0).to(values.dtype)


def spread_to_tokens(values: Tensor, batch: SequenceBatch) -> Tensor:
    """Sequence values ``[B]`` as token values ``[T]``: each token gets its sequence's."""
    lengths = torch.tensor(batch.lengths, device=values.device, dtype=torch.long)
    return torch.repeat_interleave(values, lengths)


def _centred(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean, float64 ``[B]``; the number of each one's group; the groups' sizes."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise BatchError(f"'rewards' {list(rewards.shape)} and 'group' {list(group.shape)} must both be [B]")
    check_finite(rewards, "reward")
    values = rewards.double()
    _, owner = torch.unique(group, return_inverse=True)
    counts = torch.bincount(owner).double()
    means = torch.zeros_like(counts).index_add(0, owner, values) / counts
    return values - means[owner], owner, counts
