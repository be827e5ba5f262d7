"""The loss of a policy: an objective, off-policy weights, KL to a reference and an entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, masked_fill, masked_sum
from core_rl_trainer.algorithms.aggregation import aggregate, weight_fn
from core_rl_trainer.algorithms.fields import ADVANTAGES, BEHAVIOUR, IMPORTANCE, PROXIMAL, REFERENCE
from core_rl_trainer.algorithms.kl import KLEstimator, kl_estimate, log_ratio
from core_rl_trainer.algorithms.objectives import Clipped, Objective

__all__ = ["PolicyLoss"]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Per token: ``-weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy``.

    The batch holds ``advantages``, ``logprobs`` (behaviour policy) and, where they are used,
    ``prox_logprobs``, ``ref_logprobs`` and ``importance_weights``, all ``[T]``. Ratios are to the proximal
    policy where the batch has it, else to the behaviour policy. Token fields may hold anything where the
    mask is 0.
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
            metrics |= _kl_metrics(logprobs, reference, mask)
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


def _kl_metrics(logprobs: Tensor, reference: Tensor, mask: Tensor) -> dict[str, Metric]:
    own, names = logprobs.detach(), get_args(KLEstimator)
    return _means({f"kl_{name}": kl_estimate(own, reference, name) for name in names}, mask)


def _means(values: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    count = mask.sum()
    return {name: Metric.mean(masked_sum(value, mask), count) for name, value in values.items()}
