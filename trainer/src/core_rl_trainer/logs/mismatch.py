"""The mismatch between the log-probs of train engine and rollout engine for the same tokens.

Let ``d_t = log p_trainer(x_t) - log p_rollout(x_t)`` over the ``N`` trained tokens of a batch (``loss_mask``), all of
them drawn by the rollout engine. Everything is computed in float64, from the definitions:

========= ================================================ =====================================================
name      value                                            meaning
========= ================================================ =====================================================
k1        ``mean(-d)``                                     estimate of KL(rollout || trainer), unbiased
k3        ``mean(exp(d) - 1 - d)``                         the same, never negative (Schulman 2020,
                                                           http://joschu.net/blog/kl-approx.html)
chi2      ``mean(exp(2 d)) - 1``                           estimate of chi-square(trainer || rollout): the variance
                                                           of the importance weights ``exp(d)`` of tokens
max       ``max |d|``                                      the largest difference
ppl_ratio ``mean over sequences of exp(mean_t(-d))``       the trainer's perplexity of a sequence's trained tokens
                                                           over the rollout's, as in verl
========= ================================================ =====================================================

Equal log-probs give 0, and 1 for the last. Tokens of older weights differ for a good reason, so that there are
also numbers for each version lag. At lag 0, anything but rounding means that the engines disagree, or that the weights
are stale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch

__all__ = ["mismatch_by_lag", "mismatch_of", "staleness_of"]

LOGPROBS, VERSIONS = "logprobs", "versions"
NAMES = ("mismatch_k1", "mismatch_k3", "mismatch_chi2", "mismatch_max", "mismatch_ppl_ratio")


def mismatch_of(trainer: Tensor, batch: SequenceBatch, counted: Tensor | None = None) -> dict[str, float]:
    """The five numbers of the module's docstring, as ``mismatch_k1`` and so on.

    ``trainer [T]`` are the train engine's log-probs; the rollout's are the batch's ``logprobs``.
    ``counted`` (bool ``[T]``) narrows the trained tokens further. Values at other tokens may be
    anything. Without a counted token all numbers are NaN.
    """
    mask = batch.loss_mask if counted is None else batch.loss_mask & counted
    if not bool(mask.any()):
        return dict.fromkeys(NAMES, math.nan)
    d = trainer[mask].detach().double() - batch[LOGPROBS][mask].double()
    values = (
        -d.mean(),
        (torch.expm1(d) - d).mean(),
        torch.expm1(2 * d).mean(),
        d.abs().max(),
        _reduce(-d, _owners(mask, batch), "mean").exp().mean(),
    )
    return dict(zip(NAMES, map(float, values), strict=True))


def _owners(mask: Tensor, batch: SequenceBatch) -> Tensor:
    """For each token of ``mask [T]``, the number of its sequence among sequences with such tokens; int64 ``[N]``."""
    lengths = torch.tensor(batch.lengths, device=mask.device)
    owner: Tensor = torch.repeat_interleave(lengths)[mask].unique_consecutive(return_inverse=True)[1]
    return owner


def _reduce(values: Tensor, owner: Tensor, how: str) -> Tensor:
    """``values [N]`` reduced over each sequence."""
    zeros = values.new_zeros(int(owner.max()) + 1)
    return zeros.scatter_reduce(0, owner, values, how, include_self=False)


def mismatch_by_lag(trainer: Tensor, batch: SequenceBatch, version: int) -> dict[str, float]:
    """`mismatch_of` for the tokens of each lag by itself, as ``mismatch_k1_lag0`` and so on.

    The lag of a token is ``version``, that of the weights to be trained, minus its own in ``versions``.
    """
    lags = version - batch[VERSIONS]
    present = lags[batch.loss_mask].unique().tolist()
    return {
        f"{name}_lag{lag}": value
        for lag in present
        for name, value in mismatch_of(trainer, batch, lags == lag).items()
    }


def staleness_of(batch: SequenceBatch, version: int) -> dict[str, float]:
    """The lag of a batch's trained tokens when the weights of ``version`` are trained on them.

    ``staleness_mean`` and ``staleness_max`` are lags in versions, over tokens; ``mixed_versions`` is the
    share of sequences whose tokens come from more than one version: generation continued across a weight sync.
    """
    mask = batch.loss_mask
    if not bool(mask.any()):
        return dict.fromkeys(("staleness_mean", "staleness_max", "mixed_versions"), math.nan)
    lags = (version - batch[VERSIONS])[mask].double()
    owner = _owners(mask, batch)
    mixed = _reduce(lags, owner, "amax") != _reduce(lags, owner, "amin")
    return {
        "staleness_mean": float(lags.mean()),
        "staleness_max": float(lags.max()),
        "mixed_versions": float(mixed.double().mean()),
    }
