"""Shaped rewards, and advantages from them, over the whole batch and before any split of it; the ``advantage`` section.

The rules for whole sequences take ``rewards [B]`` and integer ``group [B]``, the prompt of each, and give
float32 ``[B]``. They raise `BatchError` for wrong shapes and for rewards that are not finite, naming the
sequence. A sequence that is alone in its group has nothing to be compared with, and advantage 0.

Returns and generalised advantage estimation run over the trained tokens of a sequence. Only these are actions: the
tokens between them (a tool's reply) belong to the environment's step from one to the next, as in verl.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Discriminator, Field, Tag
from torch import Tensor

from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import masked_fill, segment_sum
from core_rl.distributed.comm import Comm
from core_rl.errors import BatchError
from core_rl_trainer.algorithms.fields import (
    BASELINE_REWARDS,
    BOOTSTRAP,
    GROUP,
    TOKEN_REWARDS,
    VALUES,
    check_finite,
)
from core_rl_trainer.algorithms.named import Custom, named_kind, named_or_fields

STD_FLOOR = 1e-6
"""Added to the standard deviation, as verl does: equal rewards give advantages of 0, not 0/0."""
VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whiten`, as verl and TRL do."""


# ------------------------------------------------------------------------------------------ rewards


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
    owners = torch.repeat_interleave(batch.cu_seqlens.diff())[mask]
    # The last trained token of each sequence, int64 ``[B]``; -1 where there is none.
    last = torch.full((batch.num_sequences,), -1, device=mask.device)
    last = last.scatter_reduce(0, owners, mask.nonzero().flatten(), "amax")
    trained = last >= 0
    return earned.index_add(0, last[trained], rewards[trained].float())


def overlong_penalty(batch: SequenceBatch, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), float32 ``[B]`` in [-1, 0].

    0 up to ``max_length - buffer`` trained tokens, then falling linearly to -1 at ``max_length``. Added to the rewards.
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


# --------------------------------------------------------------------------------------- advantages


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
    trained = values[mask].double()
    total, count = comm.sum([float(trained.sum()), float(len(trained))])
    mean = total / max(count, 1)
    (squares,) = comm.sum([float((trained - mean).square().sum())])
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


def discounted_sums(values: Tensor, owner: Tensor, decay: float) -> Tensor:
    """``sum_k decay^k * values[t + k]`` over the entries after ``t`` with the same owner; float64 ``[N]``.

    ``owner [N]`` numbers the sequence of each entry and never falls. Each round doubles how far an entry has looked
    ahead (Hillis and Steele, CACM 29, 1986), so the longest sequence costs ``log2`` of its length in vector operations.
    """
    sums, reach, factor = values.double().clone(), 1, decay
    longest = int(torch.bincount(owner).max()) if len(owner) else 0
    while reach < longest and factor != 0.0:
        ahead = torch.where(owner[:-reach] == owner[reach:], sums[reach:], 0.0)
        sums[:-reach] = sums[:-reach] + factor * ahead
        reach, factor = 2 * reach, factor * factor
    return sums


def returns_to_go(token_rewards: Tensor, batch: SequenceBatch, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each trained token on; ``[T]``, 0 at other tokens."""
    positions, owner = _trained(batch)
    sums = discounted_sums(token_rewards[positions], owner, gamma)
    return _back(sums, positions, token_rewards)


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    batch: SequenceBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    last_values: Tensor | None = None,
) -> Tensor:
    """GAE (arXiv:1506.02438, equation 16): ``sum_k (gamma * lam)^k * delta[t + k]``; ``[T]``, 0 at other tokens.

    ``delta[t] = token_rewards[t] + gamma * V(next) - values[t]``, where ``values [T]`` belong to the state before each
    token and the next state is that before the next trained token. After the last one it is ``last_values [B]``: 0 by
    default, since the completion has ended. Returns for the critic are the advantages plus ``values``.
    """
    positions, owner = _trained(batch)
    trained_values = values[positions].double()
    following = torch.zeros_like(trained_values) if last_values is None else last_values.double()[owner]
    inner = owner[:-1] == owner[1:]
    following[:-1] = torch.where(inner, trained_values[1:], following[:-1])
    deltas = token_rewards[positions].double() + gamma * following - trained_values
    return _back(discounted_sums(deltas, owner, gamma * lam), positions, values)


def _trained(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Positions of the trained tokens, and the sequence of each."""
    mask = batch.loss_mask
    counts = segment_sum(mask.long(), batch.cu_seqlens)
    owner = torch.repeat_interleave(torch.arange(len(counts), device=mask.device), counts)
    return mask.nonzero().flatten(), owner


def _back(sums: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    result[positions] = sums.to(like.dtype)
    return result


class AdvantageEstimator(Config):
    """Turns ``token_rewards [T]`` into advantages ``[T]``."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that the batch must have besides ``token_rewards``."""

    @abstractmethod
    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        """Advantages ``[T]``, over the batches of all ranks of ``comm``."""


class _OfSequences(AdvantageEstimator):
    """One advantage for each sequence, by ``rule``: from the sum of its token rewards, and from its one field."""

    rule: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    fields: ClassVar[frozenset[str]] = frozenset({GROUP})

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        rewards = segment_sum(batch[TOKEN_REWARDS].double(), batch.cu_seqlens)
        (field,) = self.fields
        return spread_to_tokens(type(self).rule(rewards, batch[field]), batch)


class GRPO(_OfSequences):
    """Against the group's mean, by its standard deviation (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """The name."""
    rule: ClassVar = grpo_advantages


class DrGRPO(_OfSequences):
    """Against the group's mean (arXiv:2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """The name."""
    rule: ClassVar = dr_grpo_advantages


class RLOO(_OfSequences):
    """Against the mean of the others in the group (arXiv:2402.14740)."""

    type: Literal["rloo"] = "rloo"
    """The name."""
    rule: ClassVar = rloo_advantages


class ReMax(_OfSequences):
    """Against the greedy completion of the same prompt (arXiv:2310.10505)."""

    type: Literal["remax"] = "remax"
    """The name."""
    rule: ClassVar = remax_advantages
    fields: ClassVar[frozenset[str]] = frozenset({BASELINE_REWARDS})


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++ (arXiv:2501.03262): rewards to go of each token, whitened over the global batch."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The name."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount for each token."""

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        returns = returns_to_go(batch[TOKEN_REWARDS], batch, self.gamma)
        return whiten(returns, batch.loss_mask, comm)


class ReinforcePlusPlusBaseline(_OfSequences):
    """REINFORCE++ with the group's mean as a baseline (arXiv:2501.03262), whitened over the global batch."""

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """The name."""
    rule: ClassVar = dr_grpo_advantages

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        return whiten(super().__call__(batch, comm), batch.loss_mask, comm)


class GAE(AdvantageEstimator):
    """Generalised advantage estimation with a critic's values (arXiv:1506.02438); PPO."""

    type: Literal["gae"] = "gae"
    """The name."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount for each token."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """1 trusts the rewards alone, 0 the critic alone."""
    bootstrap_truncated: bool = False
    """Bootstrap truncated completions from the critic's value of the next state, instead of 0."""
    fields: ClassVar[frozenset[str]] = frozenset({VALUES, BOOTSTRAP})

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        last = None
        if self.bootstrap_truncated:
            bootstrap = batch[BOOTSTRAP]
            last = bootstrap * truncated_sequences(batch, "bootstrap_truncated").to(bootstrap)
        return gae_advantages(
            batch[TOKEN_REWARDS], batch[VALUES], batch, gamma=self.gamma, lam=self.lam, last_values=last
        )


BUILT_IN = ("grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")


class CustomAdvantage(Custom, AdvantageEstimator):
    """A rule of your own: ``fn(batch) -> Tensor [T]``; the batch has ``token_rewards [T]``."""

    kind: ClassVar[str] = "advantage rule"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        advantages: Tensor = self.function()(batch)
        if advantages.shape != (batch.num_tokens,):
            raise BatchError(
                f"{self.type!r} returned advantages {list(advantages.shape)}; return one for each token, "
                f"[{batch.num_tokens}]"
            )
        return advantages


AdvantageConfig = Annotated[
    Annotated[GRPO, Tag("grpo")]
    | Annotated[DrGRPO, Tag("dr_grpo")]
    | Annotated[RLOO, Tag("rloo")]
    | Annotated[ReMax, Tag("remax")]
    | Annotated[ReinforcePlusPlus, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaseline, Tag("reinforce_plus_plus_baseline")]
    | Annotated[GAE, Tag("gae")]
    | Annotated[CustomAdvantage, Tag("custom")],
    Discriminator(named_kind(BUILT_IN)),
    BeforeValidator(named_or_fields),
]
"""A name, or its settings with the name as ``type``."""
