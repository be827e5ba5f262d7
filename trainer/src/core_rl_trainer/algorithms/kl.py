"""The Kullback-Leibler divergence: estimators from the log-probs of sampled tokens.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. With tokens
drawn from the policy ``q`` and a reference ``p``, all three estimate ``KL(q || p)``:

========= ============================ ============================================================
estimator value, with ``r = p / q``    expected gradient with respect to ``q``, used as a loss
========= ============================ ============================================================
``k1``    ``-log r``                   **zero**: right as a metric or a reward, no use as a loss
``k2``    ``(log r)^2 / 2``            that of ``KL(q || p)``
``k3``    ``(r - 1) - log r``          that of ``KL(p || q)``; never negative, small variance
========= ============================ ============================================================
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before ``exp``: beyond it a float32 ratio overflows into
``0 * inf = NaN`` in the backward pass, and any clip range is left far behind."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``log(p / q)`` from log-probs of the same shape, clamped to `MAX_LOG_RATIO` on both sides."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` in nats, same shape and dtype.

    ``logprobs`` belong to the policy that drew the tokens; gradients flow through both arguments.
    """
    match estimator:
        case "k1":
            return logprobs - ref_logprobs
        case "k2":
            return (logprobs - ref_logprobs).square() / 2
        case "k3":
            log_r = log_ratio(ref_logprobs, logprobs)
            return torch.expm1(log_r) - log_r
