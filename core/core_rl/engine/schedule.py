"""Learning-rate schedules: named ones, and functions that a user wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from core_rl.config.engine import OptimizerConfig
from core_rl.errors import ConfigError
from core_rl.registry.objects import load_object


@dataclass(frozen=True)
class ScheduleFunction:
    """The function that ``optimizer.schedule`` names; an error of it is a `ConfigError` that names it."""

    reference: str
    function: Callable[[int, int | None], object]

    @staticmethod
    def of(config: OptimizerConfig | None, total: int | None) -> ScheduleFunction | None:
        """Import the function that ``config`` names, and try it on the first step; None where it names none."""
        reference = None if config is None else config.schedule.function
        if reference is None:
            return None
        function = load_object(reference, "optimizer.schedule", ConfigError)
        if not callable(function):
            raise ConfigError(f"optimizer.schedule: {reference!r} is {function!r}, which is no function")
        schedule = ScheduleFunction(reference, function)
        schedule(0, total)
        return schedule

    def __call__(self, step: int, total: int | None) -> float:
        """The factor of the learning rate after ``step`` steps of the schedule."""
        call = f"optimizer.schedule: {self.reference}({step}, {total})"
        try:
            factor = self.function(step, total)
        except Exception as error:  # a user's code: it may raise anything
            raise ConfigError(
                f"{call} raised {type(error).__name__}: {error}; it takes the steps of the schedule so far and their "
                "total (None without one), and returns the factor of the learning rate"
            ) from error
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            raise ConfigError(f"{call} returned {factor!r}; return the factor of the learning rate, a number")
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(f"{call} returned {factor!r}; return a finite factor that is not negative")
        return float(factor)


def schedule_length(config: OptimizerConfig, total_train_steps: int | None) -> int | None:
    """Steps until the decay ends: the config's ``schedule_steps``, else ``total_train_steps``.

    None for a constant schedule, and for a function where neither is known; `ConfigError` when a decaying one has no
    end.
    """
    schedule = config.schedule
    total = config.schedule_steps or schedule.total_steps or total_train_steps
    if schedule.function is not None:
        return total
    if schedule.type == "constant":
        return None
    if total is None:
        raise ConfigError(
            f"schedule.type = {schedule.type!r} needs an end; set optimizer.schedule_steps or pass a FinetuneSpec"
        )
    if total <= schedule.warmup_steps:
        raise ConfigError(
            f"optimizer.schedule.warmup_steps = {schedule.warmup_steps}, and the schedule ends after {total} steps: "
            "none is left for the decay; lower it, train for more steps, or set optimizer.schedule_steps"
        )
    return total


def learning_rate(
    config: OptimizerConfig, step: int, total: int | None, function: ScheduleFunction | None = None
) -> float:
    """The learning rate after ``step`` calls of ``lr_scheduler_step()``; a pure function.

    Warm-up is linear and reaches the full rate at ``warmup_steps``; ``cosine`` follows
    Loshchilov and Hutter (arXiv:1608.03983) without restarts. A ``function`` replaces all of it.
    """
    if function is not None:
        return config.lr * function(step, total)
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * (step + 1) / (schedule.warmup_steps + 1)
    if total is None:
        return config.lr
    progress = min(1.0, (step - schedule.warmup_steps) / (total - schedule.warmup_steps))
    remaining = 1.0 - progress if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * remaining)
