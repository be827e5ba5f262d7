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


class Correction(Config):
    """The weights of tokens, by the ratio of each; with a type ``sequence_…``, by the ratio of its whole sequence."""

    type: str

    def ratios(self, batch: SequenceBatch) -> Tensor:
        """``proximal / behaviour`` before any limit, ``[T]``: 1 at tokens that are not trained, or their sequence's.

        That of a sequence is the product over its trained tokens.
        """
        mask = batch.loss_mask
        proximal, behaviour = masked_fill(batch[PROXIMAL], mask), masked_fill(batch[BEHAVIOUR], mask)
        if not self.type.startswith("sequence_"):
            return log_ratio(proximal, behaviour).exp()
        sums = segment_sum(proximal - behaviour, batch.cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return spread_to_tokens(sums.exp(), batch)

    @abstractmethod
    def limited(self, ratios: Tensor) -> Tensor:
        """Weights from ratios, ``[T]``."""


class Decoupled(Correction):
    """Decoupled PPO without a limit (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, equation 5)."""

    type: Literal["decoupled"] = "decoupled"
    """The name."""

    def limited(self, ratios: Tensor) -> Tensor:
        return ratios


class Truncated(Correction):
    """Truncated importance sampling (Ionides, J. Comput. Graph. Stat. 17, 2008).

    At each token: V-trace's clipped weights (IMPALA, arXiv:1802.01561) as in TIS (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). For each sequence: unbiased up to the limit, where token
    weights are not (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch").
    """

    type: Literal["token_truncated", "sequence_truncated"] = "token_truncated"
    """The name."""
    limit: float = Field(default=2.0, gt=0.0)
    """Weights above it are set to it."""

    def limited(self, ratios: Tensor) -> Tensor:
        return ratios.clamp(max=self.limit)


class Masked(Correction):
    """Masked importance sampling. Masked tokens still count in means.

    At each token: AReaL's cap (arXiv:2505.24298), and with ``low`` IcePop (Ring-1T, arXiv:2510.18855). For each
    sequence: distant sequences are left out (Liu, Li et al. 2025, as above).
    """

    type: Literal["token_masked", "sequence_masked"] = "token_masked"
    """The name."""
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


CorrectionConfig = Annotated[
    Decoupled | Truncated | Masked, Field(discriminator="type"), BeforeValidator(named_or_fields)
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
