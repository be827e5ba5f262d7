"""One AdamW step with a known mistake in it, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core_rl_oracle.oracle import AdamW, AdamWState, grad_norm

__all__ = ["RIGHT", "Rule", "rule_step"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a step is made; what is left out is right."""

    coupled: bool = False
    """The decay is added to the gradients, as in Adam with L2 regularization."""
    vectors: bool = False
    """Norms and biases decay as well."""
    base_decay: bool = False
    """The decay has the configured learning rate, not that of the schedule."""
    undecayed: frozenset[str] = frozenset()
    """Matrices that do not decay."""
    scale: float = 1.0
    """What the gradients are multiplied by before they are clipped."""
    unclipped: frozenset[Literal["exp_avg", "exp_avg_sq"]] = frozenset()
    """The moments that get the gradients before clipping."""
    late: int = 0
    """How many steps the bias correction lags behind; it never falls below 1."""
    most: int | None = None
    """The bias correction stays at this number of steps."""
    modulus: int | None = None
    """The step count wraps around at this number."""
    uncorrected: frozenset[Literal["exp_avg", "exp_avg_sq"]] = frozenset()
    """The moments whose bias is not corrected."""
    eps: Literal["outside", "inside", "before"] = "outside"
    """Added to the square root, inside it, or to it before the bias correction."""
    nesterov: bool = False
    amsgrad: bool = False

    def count(self, steps: int) -> int:
        """The count of the bias correction in step ``steps`` (from 1)."""
        found = max(1, steps - self.late)
        found = found if self.most is None else min(found, self.most)
        return found if self.modulus is None else max(1, found % self.modulus)


RIGHT = Rule()


def rule_step(
    rule: Rule,
    config: AdamW,
    state: AdamWState,
    grads: Mapping[str, Tensor],
    rate: float,
    largest: dict[str, Tensor],
) -> None:
    """Update ``state`` in place with ``grads``, as ``rule`` says.

    ``largest`` are the largest second moments so far, which AMSGrad needs; it is updated as well.
    """
    scaled = {name: rule.scale * value.double() for name, value in grads.items()}
    clip = config.clip_scale(grad_norm(scaled))
    state.count += 1
    for name, value in scaled.items():
        parameter = state.params[name]
        decay = config.weight_decay * ((parameter.dim() >= 2 or rule.vectors) and name not in rule.undecayed)
        given = {
            kind: (1.0 if kind in rule.unclipped else clip) * value
            + (decay * parameter if rule.coupled else 0.0)
            for kind in ("exp_avg", "exp_avg_sq")
        }
        _update_moments(config, state, name, given)
        if not rule.coupled:
            parameter.mul_(1 - (config.lr if rule.base_decay else rate) * decay)
        second = state.exp_avg_sq[name]
        if rule.amsgrad:
            second = largest[name] = torch.maximum(second, largest.get(name, second))
        parameter.sub_(rate * _direction(rule, config, state, name, given["exp_avg"], second))


def _update_moments(config: AdamW, state: AdamWState, name: str, given: Mapping[str, Tensor]) -> None:
    beta1, beta2 = config.betas
    state.exp_avg[name].mul_(beta1).add_(given["exp_avg"] * (1 - beta1))
    state.exp_avg_sq[name].mul_(beta2).add_(given["exp_avg_sq"].square() * (1 - beta2))


def _direction(
    rule: Rule, config: AdamW, state: AdamWState, name: str, grad: Tensor, second: Tensor
) -> Tensor:
    """What the learning rate is multiplied by."""
    (beta1, beta2), count = config.betas, rule.count(state.count)
    first = state.exp_avg[name]
    first = beta1 * first + (1 - beta1) * grad if rule.nesterov else first
    first = first if "exp_avg" in rule.uncorrected else first / (1 - beta1**count)
    bias: float = 1.0 if "exp_avg_sq" in rule.uncorrected else 1 - beta2**count
    match rule.eps:
        case "inside":
            return first / (second / bias + config.eps).sqrt()
        case "before":
            return first / ((second.sqrt() + config.eps) / math.sqrt(bias))
        case "outside":
            return first / ((second / bias).sqrt() + config.eps)
