"""Off-policy correction: weights for tokens that a different policy than the trained policy drew.

The *behaviour* policy drew the tokens (an older version, or the same weights in a rollout engine with other
kernels); the *proximal* policy is the train engine's before the step's updates. The loss takes ratios to the
proximal policy and weighs each token by ``proximal / behaviour``. Weights carry no gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import masked_fill, segment_sum
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms.advantages import spread_to_tokens
from core_rl_trainer.algorithms.fields import BEHAVIOUR, PROXIMAL
from core_rl_trainer.algorithms.kl import MAX_LOG_RATIO, log_ratio
from core_rl_trainer.algorithms.named import named_or_fields

__all__ = [
    "Correction",
    "CorrectionConfig",
    "Decoupled",
    "SequenceMasked",
    "SequenceTruncated",
    "TokenMasked",
    "TokenTruncated",
    "importance_metrics",
]


class Correction(Config):
    """The weights of tokens."""

    def ratios(self, batch: SequenceBatch) -> Tensor:
        """``proximal / behaviour`` before any limit, ``[T]``: each trained token's, and 1 at others."""
        return log_ratio(*_masked_logprobs(batch)).exp()

    @abstractmethod
    def limited(self, ratios: Tensor) -> Tensor:
        """Weights from ratios, ``[T]``."""


def _masked_logprobs(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Log-probs under the proximal and the behaviour policy, 0 where tokens are not trained."""
    mask = batch.loss_mask
    return masked_fill(batch[PROXIMAL], mask), masked_fill(batch[BEHAVIOUR], mask)


class _OfSequences(Correction):
    def ratios(self, batch: SequenceBatch) -> Tensor:
        """The product of a sequence's token ratios, at each of its tokens, ``[T]``."""
        proximal, behaviour = _masked_logprobs(batch)
        sums = segment_sum(proximal - behaviour, batch.cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return spread_to_tokens(sums.exp(), batch)


class _Truncated(Correction):
    """Truncated importance sampling (Ionides, J. Comput. Graph. Stat. 17, 2008)."""

    limit: float = Field(default=2.0, gt=0.0)
    """Weights above it are set to it."""

    def limited(self, ratios: Tensor) -> Tensor:
        return ratios.clamp(max=self.limit)


class _Masked(Correction):
    """Masked importance sampling. Masked tokens still count in means."""

    low: float = Field(default=0.0, ge=0.0)
    """Weights below it are set to 0."""
    high: float = Field(default=2.0, gt=0.0)
    """Weights above it are set to 0."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self

    def limited(self, ratios: Tensor) -> Tensor:
        return torch.where((ratios >= self.low) & (ratios <= self.high), ratios, 0.0)


class Decoupled(Correction):
    """Decoupled PPO without a limit (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, equation 5)."""

    type: Literal["decoupled"] = "decoupled"
    """The name."""

    def limited(self, ratios: Tensor) -> Tensor:
        return ratios


class TokenTruncated(_Truncated):
    """Truncated at each token: V-trace's clipped weights (IMPALA, arXiv:1802.01561) as in TIS.

    TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """

    type: Literal["token_truncated"] = "token_truncated"
    """The name."""


class TokenMasked(_Masked):
    """Masked at each token: AReaL's cap (arXiv:2505.24298), and with ``low`` IcePop (Ring-1T, arXiv:2510.18855)."""

    type: Literal["token_masked"] = "token_masked"
    """The name."""


class SequenceTruncated(_OfSequences, _Truncated):
    """Truncated for each whole sequence: unbiased up to the limit, where token weights are not.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """

    type: Literal["sequence_truncated"] = "sequence_truncated"
    """The name."""


class SequenceMasked(_OfSequences, _Masked):
    """Masked for each whole sequence: distant sequences are left out (Liu, Li et al. 2025, as above)."""

    type: Literal["sequence_masked"] = "sequence_masked"
    """The name."""


CorrectionConfig = Annotated[
    Decoupled | TokenTruncated | TokenMasked | SequenceTruncated | SequenceMasked,
    Field(discriminator="type"),
    BeforeValidator(named_or_fields),
]
"""A name, or its settings with the name as ``type``."""


def importance_metrics(correction: Correction, batch: SequenceBatch, comm: Comm) -> dict[str, float]:
    """Statistics of the weights of the trained tokens, over all ranks of ``comm``. Collective.

    ``importance_mean``, ``_max`` and ``_min`` are taken before any limit; the mean is 1 in expectation.
    ``importance_limited`` is the part of the tokens that the limit changed. ``importance_ess`` is the effective
    sample size ``(sum w)^2 / sum w^2`` of the limited weights, as a part of the tokens.
    """
    mask = batch.loss_mask
    ratios = correction.ratios(batch)[mask].double()
    weights = correction.limited(ratios)
    sums = [ratios.sum(), (weights != ratios).sum(), weights.sum(), weights.square().sum()]
    count, total, limited, first, second = comm.sum([float(len(ratios)), *(float(value) for value in sums)])
    extremes = [float(ratios.max()), -float(ratios.min())] if len(ratios) else [-torch.inf, -torch.inf]
    most, least = comm.max(extremes)
    if not count:
        return {}
    return {
        "importance_mean": total / count,
        "importance_max": most,
        "importance_min": -least,
        "importance_limited": limited / count,
        "importance_ess": first * first / (count * second) if second else 0.0,
    }
