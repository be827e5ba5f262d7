"""The Kullback-Leibler divergence: estimators from the log-probs of sampled tokens, and control of its coefficient.

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

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "KLController", "KLEstimator", "kl_estimate", "log_ratio"]

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before ``exp``: beyond it a float32 ratio overflows into
``0 * inf = NaN`` in the backward pass, and any clip range is left far behind."""

MAX_ERROR = 0.2
"""The relative error of the divergence is clipped to this on both sides (arXiv:1909.08593, section 2.2)."""


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


class KLController:
    """Ziegler et al., arXiv:1909.08593, section 2.2: proportional control of the log of the coefficient.

    After ``n`` sequences with a mean divergence of ``kl`` the coefficient is multiplied by
    ``1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon``. Without a target it stays.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000.0) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, sequences: float) -> None:
        """Take the divergence (nats for each token) of a step of as many ``sequences`` into account."""
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * sequences / self._horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from `state_dict`."""
        self.coef = float(state["coef"])
