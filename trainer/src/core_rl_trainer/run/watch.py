"""Warnings when a run learns nothing, with the likely cause; ``stop_on`` ends the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from core_rl_trainer.data.tokenizers import describe_end_tokens
from core_rl_trainer.recipe.sections import StopSection

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]

WARN_AFTER = 3
"""Steps in a row before a warning, where a single step proves nothing."""
SMALLEST = 1e-8
"""Advantages below it come from rounding."""
NEAR_FLOOR = 0.02
"""The share of the way from the lowest reward to the best mean, below which a mean counts as fallen."""
LEARNED = 0.1
"""The share of the way from the lowest reward to the highest, from which a mean can fall."""
LOSSES = ("loss", "grad_norm", "critic_loss", "critic_grad_norm")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a run by ``stop_on``."""

    reason: str
    weights_are_good: bool
    """Whether the weights after the step are worth a checkpoint."""


@dataclass(kw_only=True)
class _Rule:
    """Something that may go wrong in a step, and how many steps in a row it did."""

    name: str
    applies: Callable[[Metrics], bool]
    explain: Callable[[Metrics], str]
    warn_after: int = WARN_AFTER
    stop_after: int | None = None
    weights_are_good: bool = True
    streak: int = field(default=0, init=False)


class Watch:
    """Sees the metrics of every step."""

    def __init__(self, stop_on: StopSection, end_tokens: Mapping[int, str]) -> None:
        self._lowest, self._highest, self._best = math.inf, -math.inf, -math.inf
        self._rules = (
            _Rule(
                name="nan",
                applies=_not_finite,
                explain=_why_not_finite,
                warn_after=1,
                stop_after=1 if stop_on.nan else None,
                weights_are_good=False,
            ),
            _Rule(
                name="no_signal",
                applies=_without_signal,
                explain=_why_no_signal,
                stop_after=_patience(stop_on.no_signal),
            ),
            _Rule(
                name="skipped",
                applies=lambda metrics: metrics.get("update_successful") == 0,
                explain=_why_skipped,
                stop_after=_patience(stop_on.skipped),
            ),
            _Rule(
                name="truncated",
                applies=lambda metrics: metrics.get("truncated") == 1,
                explain=lambda metrics: _why_truncated(metrics, end_tokens),
            ),
            _Rule(name="floor", applies=self._has_fallen, explain=self._why_fallen),
        )

    def see(self, step: int, metrics: Metrics) -> Verdict | None:
        """Warn about the steps up to ``step``; a verdict where the run is to end."""
        for rule in self._rules:
            rule.streak = rule.streak + 1 if rule.applies(metrics) else 0
            if rule.streak == rule.warn_after:
                logger.warning("step %d: %s", step, rule.explain(metrics))
        self._lowest = min(self._lowest, metrics.get("reward_min", math.inf))
        self._highest = max(self._highest, metrics.get("reward_max", -math.inf))
        self._best = max(self._best, metrics.get("reward", -math.inf))
        for rule in self._rules:
            if rule.streak == rule.stop_after:
                reason = f"step {step}, stop_on.{rule.name}: {rule.explain(metrics)}"
                return Verdict(reason=reason, weights_are_good=rule.weights_are_good)
        return None

    # ------------------------------------------------------- the reward's floor

    def _has_fallen(self, metrics: Metrics) -> bool:
        if "reward" not in metrics or not self._lowest < self._best:
            return False
        lowest = min(self._lowest, metrics["reward_min"])
        had_learned = self._best - lowest >= LEARNED * (self._highest - lowest)
        return had_learned and metrics["reward"] - lowest <= NEAR_FLOOR * (self._best - lowest)

    def _why_fallen(self, metrics: Metrics) -> str:
        return (
            f"the reward has fallen to {metrics['reward']:g}, about its lowest value, after a mean of {self._best:g}: "
            "the model no longer completes as it did. Look at samples.jsonl; a smaller optimizer.lr, "
            "algorithm.args.kl_coef above 0, or an earlier checkpoint may help"
        )


def _patience(setting: bool | int) -> int | None:
    """Steps in a row; None for never."""
    if isinstance(setting, bool):
        return WARN_AFTER if setting else None
    return setting


def _not_finite(metrics: Metrics) -> bool:
    return any(not math.isfinite(metrics.get(name, 0.0)) for name in LOSSES)


def _why_not_finite(metrics: Metrics) -> str:
    values = ", ".join(
        f"{name} is {metrics[name]:g}" for name in LOSSES if not math.isfinite(metrics.get(name, 0.0))
    )
    return (
        f"{values}; such an update is skipped and changes no weight. Often the learning rate is too high (a "
        "smaller optimizer.lr, a longer optimizer.schedule.warmup_steps), or dtype=bfloat16 is too coarse for the loss"
    )


def _without_signal(metrics: Metrics) -> bool:
    """All advantages are 0, or all completions of the step have one reward, which nothing can be learned from."""
    equal = "reward" in metrics and metrics["reward_max"] == metrics["reward_min"]
    return equal or metrics.get("advantage_max", math.inf) <= SMALLEST


def _why_no_signal(metrics: Metrics) -> str:
    if metrics.get("groups_without_signal") != 1:
        return "all advantages are 0, so that nothing is learned; look at samples.jsonl and at the reward function"
    return (
        f"the completions of each prompt all have the same reward ({metrics['reward']:g} on average), so that nothing "
        "is learned from comparing them. Look at samples.jsonl and at the reward function; prompts that are much too "
        "hard or too easy, and a low rollout.temperature, do the same"
    )


def _why_truncated(metrics: Metrics, end_tokens: Mapping[int, str]) -> str:
    return (
        f"all completions are truncated, after {metrics.get('completion_tokens', 0.0):,.0f} tokens on average: none "
        f"has an end token ({describe_end_tokens(end_tokens)}). rollout.max_new_tokens is too small, or the model "
        "writes none; look at their last tokens in samples.jsonl. Where they end with another token, add it to "
        "rollout.stop_token_ids; where they do not end, train the model with SFT first"
    )


def _why_skipped(metrics: Metrics) -> str:
    if _not_finite(metrics):
        cause = "the loss or a gradient is not finite"
    elif metrics.get("updates") == 0:
        cause = (
            "no completion is left to train: the rewards of each prompt are equal (drop_equal_groups), or completions "
            "are truncated (mask_truncated_completions)"
        )
    else:
        cause = "no token of the batches counts in the loss; look at the loss masks of the data"
    return f"every update was skipped: {cause}"
