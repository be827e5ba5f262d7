"""Terms of a loss on rollouts, and the weights of tokens that they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Literal, get_args

import torch
from torch import Tensor

from core_rl_conformance.differences.token_weights import TokenWeights
from core_rl_conformance.inputs.rollouts import Rollout, Rollouts
from core_rl_oracle.group_advantages import group_advantages, mistaken_advantages
from core_rl_oracle.loss_names import AdvantageRule, KLEstimator, Objective
from core_rl_oracle.policy_losses import PolicyLoss

Mean = Literal["tokens", "sequences", "whole sequences", "groups"]
"""What counts the same: each trained token; each sequence, by its trained tokens or by all of its tokens; each group of
completions of one prompt, by its trained tokens."""


@dataclass(frozen=True)
class Clip:
    """Bounds of ratios; None where no ratio of the rollouts is cut."""

    low: float | None = None
    high: float | None = None
    dual: float | None = None

    def __str__(self) -> str:
        bounds = {"below": self.low, "above": self.high, "dual": self.dual}
        given = [f"{name} {value:g}" for name, value in bounds.items() if value is not None]
        return ", ".join(given) or "none"


@dataclass(frozen=True)
class KLTerm:
    """The KL term of a loss."""

    estimator: KLEstimator = "k3"
    coef: float = 0.0
    times_ratio: bool = False

    def __str__(self) -> str:
        ratio = ", multiplied by the ratio" if self.times_ratio else ""
        return f"{self.coef:.4g} times {self.estimator}{ratio}" if self.coef else "none"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one loss, in the order in which a trainer applies them."""

    mask: str = "as given"
    advantages: str = "as given"
    temperature: float = 1.0
    objective: Objective = "reinforce"
    clip: Clip = Clip()
    kl: KLTerm = KLTerm()
    entropy: float = 0.0
    mean: Mean = "tokens"
    scale: float = 1.0
    """Factor of the whole loss."""

    @property
    def loss(self) -> PolicyLoss:
        """Objective, KL and entropy as the oracle has them."""
        return PolicyLoss(
            objective=self.objective,
            clip_low=1.0 if self.clip.low is None else self.clip.low,
            clip_high=1e9 if self.clip.high is None else self.clip.high,
            dual_limit=1e9 if self.clip.dual is None else self.clip.dual,
            kl_coef=self.kl.coef,
            kl_estimator=self.kl.estimator,
            kl_times_ratio=self.kl.times_ratio,
            entropy_coef=self.entropy,
            temperature=self.temperature,
        )


def masks_of(rollouts: Rollouts) -> dict[str, Rollouts]:
    """The rollouts with every mask that trainers are known to use, by its name; equal ones once."""
    variants = {
        "as given": [row.mask for row in rollouts.rows],
        "without the last trained token": [_without_last(row.mask) for row in rollouts.rows],
        "prompts too": [(True,) * len(row.mask) for row in rollouts.rows],
        "holes too": [_without_holes(row.mask) for row in rollouts.rows],
        "one token early": [(*row.mask[1:], False) for row in rollouts.rows],
        "one token late": [(False, *row.mask[:-1]) for row in rollouts.rows],
    }
    result: dict[str, Rollouts] = {}
    for name, masks in variants.items():
        masked = Rollouts(
            tuple(replace(row, mask=mask) for row, mask in zip(rollouts.rows, masks, strict=True))
        )
        if masked not in result.values():
            result[name] = masked
    return result


def _without_last(mask: Sequence[bool]) -> tuple[bool, ...]:
    last = max((t for t, trained in enumerate(mask) if trained), default=-1)
    return tuple(trained and t != last for t, trained in enumerate(mask))


def _without_holes(mask: Sequence[bool]) -> tuple[bool, ...]:
    trained = [t for t, use in enumerate(mask) if use] or [len(mask)]
    return tuple(trained[0] <= t <= trained[-1] for t in range(len(mask)))


def advantages_of(rollouts: Rollouts) -> Iterator[tuple[str, Rollouts]]:
    """The rollouts with advantages by every rule and usual mistake, each also whitened over trained tokens."""
    rewards, groups = [row.reward for row in rollouts.rows], [row.group for row in rollouts.rows]
    rules = {
        f"by {rule}": group_advantages(rule, rewards, groups)
        for rule in get_args(AdvantageRule)
        if min(map(groups.count, groups)) > 1
    }
    rules |= dict(mistaken_advantages("grpo", rewards, groups)) if len(set(rewards)) > 1 else {}
    named = {"as given": rollouts} | {
        name: rollouts.with_advantages(values) for name, values in rules.items()
    }
    yield from named.items()
    for name, variant in named.items():
        trained = [
            value for row in variant.rows for value, use in zip(row.advantages, row.mask, strict=True) if use
        ]
        mean, deviation = fmean(trained), pstdev(trained) or 1.0
        rows = (
            replace(row, advantages=tuple((value - mean) / deviation for value in row.advantages))
            for row in variant.rows
        )
        yield f"{name}, whitened over trained tokens", Rollouts(tuple(rows))


def shares_of(mean: Mean, rows: Sequence[Rollout]) -> Tensor:
    """The factor of each sequence of ``rows`` before the sum over its trained tokens, float64."""
    counts = [sum(row.mask[1:]) for row in rows]
    trained = sum(count > 0 for count in counts)
    match mean:
        case "tokens":
            factors = [1.0 / max(1, sum(counts))] * len(rows)
        case "sequences":
            factors = [1.0 / (trained * max(1, count)) for count in counts]
        case "whole sequences":
            factors = [1.0 / (trained * len(row.ids)) for row in rows]
        case "groups":
            tokens = {row.group: 0 for row in rows}
            for row, count in zip(rows, counts, strict=True):
                tokens[row.group] += count
            factors = [1.0 / (len(tokens) * max(1, tokens[row.group])) for row in rows]
    return torch.tensor(factors, dtype=torch.float64)


def weights_of(terms: Terms, rollouts: Rollouts, logprobs: Sequence[Tensor]) -> TokenWeights:
    """Weights of the tokens of ``rollouts``, which have the mask and the advantages of ``terms``.

    ``logprobs``: of the trained policy at its temperature, ``[L - 1]`` for each sequence.
    """
    sums = sums_of(terms, rollouts, logprobs)
    lengths = torch.tensor([len(values) for values in logprobs])
    factors = terms.scale * shares_of(terms.mean, rollouts.rows).repeat_interleave(lengths)
    return TokenWeights(logprobs=factors * sums.logprobs, entropy=factors * sums.entropy)


def sums_of(terms: Terms, rollouts: Rollouts, logprobs: Sequence[Tensor]) -> TokenWeights:
    """The same in the sum over all trained tokens, before any mean."""
    of_logprobs, of_entropy = [], []
    for row, values in zip(rollouts.for_oracle(), logprobs, strict=True):
        drawn = torch.cat([values.new_zeros(1), values]).requires_grad_()
        entropy = torch.zeros_like(drawn).requires_grad_()
        total, _ = terms.loss.of_sequence({"logprobs": drawn, "entropy": entropy}, row)
        grads = torch.autograd.grad(total, [drawn, entropy], allow_unused=True, materialize_grads=True)
        of_logprobs.append(grads[0][1:])
        of_entropy.append(grads[1][1:])
    return TokenWeights(logprobs=torch.cat(of_logprobs), entropy=torch.cat(of_entropy))
