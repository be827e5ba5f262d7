"""Learning-rate schedules that a user wrote as a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from core_rl.config.engine import OptimizerConfig
from core_rl.errors import ConfigError
from core_rl.registry.objects import load_object

__all__ = ["ScheduleFunction"]


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
        found = load_object(reference, "optimizer.schedule", ConfigError)
        if not callable(found):
            raise ConfigError(f"optimizer.schedule: {reference!r} is {found!r}, which is no function")
        schedule = ScheduleFunction(reference, found)
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
