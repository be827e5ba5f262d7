"""Reward shaping before advantages are taken: KL penalties, length penalties, groups without signal."""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import masked_fill, segment_sum
from core_rl.errors import BatchError
from core_rl_trainer.algorithms.fields import check_finite


def token_rewards(rewards: Tensor, batch: SequenceBatch, penalties: Tensor | None = None) -> Tensor:
    """The reward of each sequence at its last trained token, minus ``penalties [T]`` at all trained tokens.

    With ``penalties = kl_coef * kl_estimate(…)`` this is the reward of InstructGPT (arXiv:2203.02155,
    equation 2) and of PPO for language models (arXiv:1909.08593, equation 2). ``rewards [B]`` give float32
    ``[T]``; a sequence without trained tokens earns nothing.
    """
    check_finite(rewards, "reward")
    mask = batch.loss_mask
    earned = torch.zeros(batch.num_tokens, dtype=torch.float32, device=rewards.device)
    if penalties is not None:
        earned -= masked_fill(penalties, mask).float()
    last = _last_trained(mask, batch)
    trained = last >= 0
    return earned.index_add(0, last[trained], rewards[trained].float())


def _last_trained(mask: Tensor, batch: SequenceBatch) -> Tensor:
    """The position of the last trained token of each sequence, int64 ``[B]``; -1 where there is none."""
    places = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    parts = places.split(batch.lengths) if batch.num_sequences else ()
    return torch.stack([part.max() for part in parts]) if parts else places.new_zeros(0)


def overlong_penalty(batch: SequenceBatch, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), float32 ``[B]`` in [-1, 0].

    0 up to ``max_length - buffer`` trained tokens, then falling linearly to -1 at ``max_length``. Added to
    the rewards.
    """
    if not 0 < buffer <= max_length:
        raise BatchError(
            f"overlong buffer = {buffer}; it must be at least 1 and at most max_length = {max_length}"
        )
    lengths = segment_sum(batch.loss_mask.float(), batch.cu_seqlens)
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def truncated_sequences(batch: SequenceBatch, setting: str) -> Tensor:
    """Whether each sequence ended at the limit of tokens, or of turns; bool ``[B]``.

    Raises `BatchError` that names the ``setting`` where the batch does not hold stop reasons.
    """
    if "stop_reason" not in batch.meta:
        raise BatchError(f"{setting} needs the meta field 'stop_reason'; the batch has none")
    return torch.tensor([reason == "length" for reason in batch.meta["stop_reason"]], dtype=torch.bool)


def groups_with_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """DAPO's dynamic sampling (arXiv:2503.14476, equation 11): whether the rewards of a sequence's group differ.

    ``rewards [B]`` and ``group [B]`` give bool ``[B]``. A group whose rewards are all equal has no gradient.
    """
    _, owner = torch.unique(group, return_inverse=True)
    count = int(owner.max()) + 1 if len(owner) else 0
    least = rewards.new_full((count,), torch.inf).scatter_reduce(0, owner, rewards, "amin")
    most = rewards.new_full((count,), -torch.inf).scatter_reduce(0, owner, rewards, "amax")
    return (most > least)[owner]
