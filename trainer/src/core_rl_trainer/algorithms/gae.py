"""Returns and generalised advantage estimation over packed sequences.

Only trained tokens are actions: tokens between them (a tool's reply) belong to the environment's step
from one to the next, as in verl. So all recurrences run over the trained tokens of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import segment_sum

__all__ = ["discounted_sums", "gae_advantages", "returns_to_go"]


def discounted_sums(values: Tensor, owner: Tensor, decay: float) -> Tensor:
    """``sum_k decay^k * values[t + k]`` over the entries after ``t`` with the same owner; float64 ``[N]``.

    ``owner [N]`` numbers the sequence of each entry and never falls. Each round doubles how far an entry has
    looked ahead (Hillis and Steele, CACM 29, 1986), so the longest sequence costs ``log2`` of its length in
    vector operations.
    """
    sums, reach, factor = values.double().clone(), 1, decay
    longest = int(torch.bincount(owner).max()) if len(owner) else 0
    while reach < longest and factor != 0.0:
        ahead = torch.where(owner[:-reach] == owner[reach:], sums[reach:], 0.0)
        sums[:-reach] = sums[:-reach] + factor * ahead
        reach, factor = 2 * reach, factor * factor
    return sums


def returns_to_go(token_rewards: Tensor, batch: SequenceBatch, gamma: float = 1.0) -> Tensor:
    """The discounted sum of what each trained token and those after it earn; ``[T]``, 0 at other tokens."""
    chosen, owner = _trained(batch)
    sums = discounted_sums(token_rewards[chosen], owner, gamma)
    return _back(sums, chosen, token_rewards)


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

    ``delta[t] = token_rewards[t] + gamma * V(next) - values[t]``, where ``values [T]`` are those of the state
    before each token and the next state is that before the next trained token. After the last one it is
    ``last_values [B]``: 0 by default, since the completion has ended. Returns for the critic are the advantages
    plus ``values``.
    """
    chosen, owner = _trained(batch)
    own = values[chosen].double()
    following = torch.zeros_like(own) if last_values is None else last_values.double()[owner]
    inner = owner[:-1] == owner[1:]
    following[:-1] = torch.where(inner, own[1:], following[:-1])
    deltas = token_rewards[chosen].double() + gamma * following - own
    return _back(discounted_sums(deltas, owner, gamma * lam), chosen, values)


def _trained(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Positions of the trained tokens, and the sequence of each."""
    mask = batch.loss_mask
    counts = segment_sum(mask.long(), batch.cu_seqlens)
    owner = torch.repeat_interleave(torch.arange(len(counts), device=mask.device), counts)
    return mask.nonzero().flatten(), owner


def _back(sums: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    result[chosen] = sums.to(like.dtype)
    return result
