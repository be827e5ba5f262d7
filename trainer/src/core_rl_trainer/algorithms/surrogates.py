"""Policy objectives: the quantity that is maximised at each token, given log-probs, old log-probs and advantages.

All take ``logprobs`` (with a graph), ``old`` and ``advantages``, each ``[T]`` and 0 where ``loss_mask`` is
false, and give a `Surrogate`. The entropy bonus, the KL term and off-policy weights are added by
`PolicyLoss`, which turns the sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import masked_fill, segment_sum
from core_rl_trainer.algorithms.advantages import spread_to_tokens
from core_rl_trainer.algorithms.aggregation import sequence_mean
from core_rl_trainer.algorithms.kl import MAX_LOG_RATIO, log_ratio

__all__ = [
    "Surrogate",
    "cispo_surrogate",
    "clipped_surrogate",
    "dual_clipped_surrogate",
    "gspo_surrogate",
    "reinforce_surrogate",
    "sequence_clipped_surrogate",
]


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """An objective at each token, to be maximised."""

    values: Tensor
    """``[T]``."""
    clipped: Tensor
    """Bool ``[T]``: where the clip range took the gradient away (or, for CISPO, bounded its weight)."""


def clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float
) -> Surrogate:
    """PPO (arXiv:1707.06347, equation 7): ``min(r * A, clip(r, 1 - low, 1 + high) * A)`` with each token's ratio.

    With ``high > low`` this is DAPO's clip-higher (arXiv:2503.14476, section 3.1).
    """
    return _clipped(log_ratio(logprobs, old), advantages, low, high)


def dual_clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, limit: float
) -> Surrogate:
    """Dual-clip PPO (arXiv:1912.09729, equation 5): where ``A < 0``, at least ``limit * A``.

    It bounds what one token with a huge ratio and a negative advantage can do; ``limit`` is above 1.
    """
    plain = clipped_surrogate(logprobs, old, advantages, low, high)
    floor = limit * advantages
    bounded = (advantages < 0) & (plain.values < floor)
    return Surrogate(values=torch.where(bounded, floor, plain.values), clipped=plain.clipped | bounded)


def gspo_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch, low: float, high: float
) -> Surrogate:
    """GSPO (arXiv:2507.18071, equations 5 to 7): clipped with the geometric mean of a sequence's ratios.

    Each token carries its sequence's value, so that the mean over the tokens of a sequence is the paper's.
    The paper's clip ranges are small: 3e-4 and 4e-4.
    """
    ratios = sequence_mean(logprobs - old, batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(spread_to_tokens(ratios, batch), advantages, low, high)


def sequence_clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch, low: float, high: float
) -> Surrogate:
    """RLOO with clipping: the whole completion is one action (arXiv:2402.14740, section 3.2), and so is its ratio.

    The ratio is the product over the sequence's trained tokens. Each token carries its sequence's value.
    """
    difference = masked_fill(logprobs - old, batch.loss_mask)
    ratios = segment_sum(difference, batch.cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(spread_to_tokens(ratios, batch), advantages, low, high)


def cispo_surrogate(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): ``sg(clip(r, 1 - low, 1 + high)) * A * log-prob``.

    The clipped ratio is a weight without gradient, so no token loses its gradient.
    """
    ratios = log_ratio(logprobs.detach(), old).exp()
    weights = ratios.clamp(1 - low, 1 + high)
    return Surrogate(values=weights * advantages * logprobs, clipped=weights != ratios)


def reinforce_surrogate(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """REINFORCE (Williams, Machine Learning 8, 1992): ``A * log-prob``, for one update on fresh samples."""
    return Surrogate(values=advantages * logprobs, clipped=torch.zeros_like(advantages, dtype=torch.bool))


def _clipped(log_ratios: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    ratios = log_ratios.exp()
    plain = ratios * advantages
    clipped = ratios.clamp(1 - low, 1 + high) * advantages
    return Surrogate(values=torch.minimum(plain, clipped), clipped=clipped < plain)
