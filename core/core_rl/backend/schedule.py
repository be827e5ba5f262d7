"""The core's part of the optimizer: the learning rate of each step, and the parameters with weight decay."""

from __future__ import annotations

import math

from core_rl.config.engine import OptimizerConfig
from core_rl.errors import ConfigError

__all__ = ["decays", "learning_rate", "schedule_length"]


def schedule_length(config: OptimizerConfig, total_train_steps: int | None) -> int | None:
    """Steps until the decay ends: the config's ``total_steps``, else ``total_train_steps``.

    None for a constant schedule; `ConfigError` when a decaying one has no end.
    """
    schedule = config.schedule
    if schedule.type == "constant":
        return None
    total = schedule.total_steps or total_train_steps
    if total is None:
        raise ConfigError(
            f"schedule.type = {schedule.type!r} needs an end; set optimizer.schedule.total_steps or pass a FinetuneSpec"
        )
    if total <= schedule.warmup_steps:
        raise ConfigError(
            f"schedule.total_steps = {total} is not after warmup_steps = {schedule.warmup_steps}; raise the former"
        )
    return total


def learning_rate(config: OptimizerConfig, step: int, total: int | None) -> float:
    """The learning rate after ``step`` calls of ``lr_scheduler_step()``; a pure function.

    Warm-up is linear and reaches the full rate at ``warmup_steps``; ``cosine`` follows
    Loshchilov and Hutter (arXiv:1608.03983) without restarts.
    """
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * (step + 1) / (schedule.warmup_steps + 1)
    if total is None:
        return config.lr
    progress = min(1.0, (step - schedule.warmup_steps) / (total - schedule.warmup_steps))
    remaining = 1.0 - progress if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * remaining)


def decays(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this full (Hugging Face) shape decays: matrices do, norms and biases don't."""
    return len(shape) >= 2
