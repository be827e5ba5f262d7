"""The ``loss`` section of an actor's config, and the loss of a policy.

An objective is the quantity that is maximised at each token. `PolicyLoss` adds off-policy weights, the KL to a
reference and the entropy bonus, and turns the sign.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

import torch
from pydantic import BeforeValidator, Discriminator, Field, Tag
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, masked_fill, masked_sum, segment_sum
from core_rl.errors import LossError
from core_rl_trainer.algorithms.advantages import spread_to_tokens
from core_rl_trainer.algorithms.aggregation import Aggregation, aggregate, sequence_mean, weight_fn
from core_rl_trainer.algorithms.fields import ADVANTAGES, BEHAVIOUR, IMPORTANCE, PROXIMAL, REFERENCE
from core_rl_trainer.algorithms.kl import MAX_LOG_RATIO, KLEstimator, kl_estimate, log_ratio
from core_rl_trainer.algorithms.named import Custom, named_kind, named_or_fields


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """An objective at each token, to be maximised."""

    values: Tensor
    """``[T]``."""
    clipped: Tensor
    """Bool ``[T]``: where the clip range took the gradient away (or, for CISPO, bounded its weight)."""


class Objective(Config):
    """The quantity that is maximised at each token."""

    aggregation: Aggregation = "token_mean"
    """``token_mean``; ``sequence_mean``: each sequence counts the same, however long; or ``{fixed_length: N}``."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        """The objective of ``logprobs`` (with a graph), ``old`` and ``advantages``; ``[T]``, 0 off ``loss_mask``."""


class _ClipRange(Objective):
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Ratios below ``1 - clip_low`` gain nothing."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Ratios above ``1 + clip_high`` gain nothing."""

    def log_ratios(self, logprobs: Tensor, old: Tensor, batch: SequenceBatch) -> Tensor:
        """The log of the ratio ``r`` that counts for each token, ``[T]``; by default the token's own."""
        return log_ratio(logprobs, old)

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        """``min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)``."""
        ratios = self.log_ratios(logprobs, old, batch).exp()
        plain = ratios * advantages
        clipped = ratios.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        return Surrogate(values=torch.minimum(plain, clipped), clipped=clipped < plain)


class Clipped(_ClipRange):
    """PPO (arXiv:1707.06347, equation 7): ``min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` for each token.

    With ``clip_high > clip_low`` this is DAPO's clip-higher (arXiv:2503.14476, section 3.1).
    """

    type: Literal["clipped"] = "clipped"
    """The name."""


class DualClipped(_ClipRange):
    """Dual-clip PPO (arXiv:1912.09729, equation 5): where ``A < 0``, at least ``limit * A``.

    It bounds what one token with a huge ratio and a negative advantage can do.
    """

    type: Literal["dual_clipped"] = "dual_clipped"
    """The name."""
    limit: float = Field(default=3.0, gt=1.0)
    """Ratios above it count as this much where the advantage is negative."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        plain = super().__call__(logprobs, old, advantages, batch)
        floor = self.limit * advantages
        bounded = (advantages < 0) & (plain.values < floor)
        return Surrogate(values=torch.where(bounded, floor, plain.values), clipped=plain.clipped | bounded)


class GSPO(_ClipRange):
    """GSPO (arXiv:2507.18071, equations 5 to 7): clipped with the geometric mean of a sequence's ratios.

    Each token carries its sequence's value, so that the mean over the tokens of a sequence is the paper's.
    """

    type: Literal["gspo"] = "gspo"
    """The name."""
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    clip_high: float = Field(default=4e-4, ge=0.0)
    aggregation: Aggregation = "sequence_mean"

    def log_ratios(self, logprobs: Tensor, old: Tensor, batch: SequenceBatch) -> Tensor:
        ratios = sequence_mean(logprobs - old, batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return spread_to_tokens(ratios, batch)


class SequenceClipped(_ClipRange):
    """RLOO with clipping: the whole completion is one action (arXiv:2402.14740, section 3.2), and so is its ratio.

    The ratio is the product over the sequence's trained tokens. Each token carries its sequence's value.
    """

    type: Literal["sequence_clipped"] = "sequence_clipped"
    """The name."""
    aggregation: Aggregation = "sequence_mean"

    def log_ratios(self, logprobs: Tensor, old: Tensor, batch: SequenceBatch) -> Tensor:
        difference = masked_fill(logprobs - old, batch.loss_mask)
        ratios = segment_sum(difference, batch.cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return spread_to_tokens(ratios, batch)


class CISPO(Objective):
    """CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): ``sg(clip(r, 1 - low, 1 + high)) * A * log-prob``.

    The clipped ratio is a weight without gradient, so no token loses its gradient.
    """

    type: Literal["cispo"] = "cispo"
    """The name."""
    clip_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """Weights are at least ``1 - clip_low``; the paper has no lower bound."""
    clip_high: float = Field(default=4.0, ge=0.0)
    """Weights are at most ``1 + clip_high``; 5 as in ScaleRL (arXiv:2510.13786)."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        ratios = log_ratio(logprobs.detach(), old).exp()
        weights = ratios.clamp(1 - self.clip_low, 1 + self.clip_high)
        return Surrogate(values=weights * advantages * logprobs, clipped=weights != ratios)


class Reinforce(Objective):
    """REINFORCE (Williams, Machine Learning 8, 1992): ``A * log-prob``, for one update on fresh samples."""

    type: Literal["reinforce"] = "reinforce"
    """The name."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return Surrogate(values=advantages * logprobs, clipped=torch.zeros_like(advantages, dtype=torch.bool))


_BUILT_IN = ("clipped", "dual_clipped", "gspo", "sequence_clipped", "cispo", "reinforce")


class CustomObjective(Custom, Objective):
    """An objective of your own: ``fn(logprobs, old, advantages, batch)`` gives a `Surrogate`, or its values ``[T]``."""

    kind: ClassVar[str] = "policy loss"
    built_in: ClassVar[tuple[str, ...]] = _BUILT_IN

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        surrogate = self.function()(logprobs, old, advantages, batch)
        if isinstance(surrogate, torch.Tensor):
            surrogate = Surrogate(values=surrogate, clipped=torch.zeros_like(surrogate, dtype=torch.bool))
        if not isinstance(surrogate, Surrogate) or surrogate.values.shape != logprobs.shape:
            raise LossError(f"{self.type!r} must return a Surrogate or a tensor {list(logprobs.shape)}")
        return surrogate


ObjectiveConfig = Annotated[
    Annotated[Clipped, Tag("clipped")]
    | Annotated[DualClipped, Tag("dual_clipped")]
    | Annotated[GSPO, Tag("gspo")]
    | Annotated[SequenceClipped, Tag("sequence_clipped")]
    | Annotated[CISPO, Tag("cispo")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[CustomObjective, Tag("custom")],
    Discriminator(named_kind(_BUILT_IN)),
    BeforeValidator(named_or_fields),
]
"""A name, or its settings with the name as ``type``."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Per token: ``-weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy``.

    The batch holds ``advantages``, ``logprobs`` (behaviour policy) and, where they are used, ``prox_logprobs``,
    ``ref_logprobs`` and ``importance_weights``, all ``[T]``. Ratios are to the proximal policy where the batch has it,
    else to the behaviour policy. Token fields may hold anything where the mask is 0.
    """

    objective: Objective = field(default_factory=Clipped)
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    log_entropy: bool = False
    """Give the metric ``entropy`` also where the loss does not need it."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is computed, which takes a second pass over all logits."""
        return self.entropy_coef != 0.0 or self.log_entropy

    def spec(self, temperature: float) -> LossSpec:
        """The loss as a train engine takes it."""
        return LossSpec(
            fn=self,
            weight_fn=weight_fn(self.objective.aggregation),
            outputs=("logprobs", "entropy") if self.needs_entropy else ("logprobs",),
            temperature=temperature,
        )

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum and its metrics."""
        mask, how = batch.loss_mask, self.objective.aggregation
        logprobs = masked_fill(output["logprobs"], mask)
        behaviour, advantages = masked_fill(batch[BEHAVIOUR], mask), masked_fill(batch[ADVANTAGES], mask)
        old = masked_fill(batch[PROXIMAL], mask) if PROXIMAL in batch else behaviour

        surrogate = self.objective(logprobs, old, advantages, batch)
        gains = surrogate.values
        if IMPORTANCE in batch:
            gains = gains * masked_fill(batch[IMPORTANCE], mask)
        losses = -gains
        metrics = _ratio_metrics(log_ratio(logprobs.detach(), old), surrogate.clipped, mask)
        # The mean of -log p over tokens that were drawn from p is its entropy, in expectation.
        metrics |= _means({"entropy_estimate": -logprobs, "advantage": advantages}, mask)
        if self.needs_entropy:
            entropy = masked_fill(output["entropy"], mask)
            losses = losses - self.entropy_coef * entropy
            metrics |= _means({"entropy": entropy}, mask)
        if REFERENCE in batch:
            reference = masked_fill(batch[REFERENCE], mask)
            losses = losses + self.kl_coef * kl_estimate(logprobs, reference, self.kl_estimator)
            drawn, names = logprobs.detach(), get_args(KLEstimator)
            metrics |= _means({f"kl_{name}": kl_estimate(drawn, reference, name) for name in names}, mask)
        metrics["policy_loss"] = Metric.mean(-aggregate(gains, batch, how), weight_fn(how)(batch))
        return aggregate(losses, batch, how), metrics


def _ratio_metrics(log_ratios: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Metric]:
    ratios = log_ratios.exp()
    infinity = torch.full_like(ratios, torch.inf)
    # KL(old || policy) with tokens of the old policy: k3 with the arguments the other way round.
    approx_kl = kl_estimate(torch.zeros_like(ratios), log_ratios, "k3")
    return {
        **_means({"approx_kl": approx_kl, "clip_fraction": clipped.to(ratios.dtype)}, mask),
        "ratio_max": Metric.max(torch.where(mask, ratios, -infinity).max()),
        "ratio_min": Metric.min(torch.where(mask, ratios, infinity).min()),
    }


def _means(values: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    count = mask.sum()
    return {name: Metric.mean(masked_sum(value, mask), count) for name, value in values.items()}
