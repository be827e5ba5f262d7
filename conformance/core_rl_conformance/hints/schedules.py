"""Known mistakes around schedules: the rates that each gives, to compare with a wrong engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core_rl_oracle.oracle import Schedule

Factor = Callable[[Schedule, int], float]
"""The factor of the learning rate, from a schedule and the number of a step."""


def _late_warmup(schedule: Schedule, step: int) -> float:
    warm = step < schedule.warmup_steps
    return step / (schedule.warmup_steps + 1) if warm else schedule.factor(step)


def _from_zero(schedule: Schedule, step: int) -> float:
    """As in transformers' ``get_linear_schedule_with_warmup``."""
    warm = step < schedule.warmup_steps
    return step / schedule.warmup_steps if warm else schedule.factor(step)


def _zero_behind_the_end(schedule: Schedule, step: int) -> float:
    ended = schedule.total_steps is not None and step > schedule.total_steps
    return 0.0 if ended else schedule.factor(step)


def _of_type(schedule: Schedule, step: int) -> float:
    other = replace(schedule, type="linear" if schedule.type == "cosine" else "cosine")
    return schedule.factor(step) if schedule.total_steps is None else other.factor(step)


MISTAKES: Mapping[str, Factor] = {
    "the warm-up is late by one step, and begins with 0": _late_warmup,
    "the warm-up begins with 0, and rises by step / warmup_steps": _from_zero,
    "there is no warm-up": lambda schedule, step: replace(schedule, warmup_steps=0).factor(step),
    "each step has the rate of the step before": lambda schedule, step: schedule.factor(max(0, step - 1)),
    "each step has the rate of the step after": lambda schedule, step: schedule.factor(step + 1),
    "the rate is 0 behind the end, and not the smallest": _zero_behind_the_end,
    "min_lr_ratio is not used": lambda schedule, step: replace(schedule, min_lr_ratio=0.0).factor(step),
    "a cosine decays as a line, or a line as a cosine": _of_type,
    "the rate never decays": lambda schedule, step: replace(schedule, type="constant").factor(step),
}


def explain_rates(
    got: Sequence[float], steps: Sequence[int], schedule: Schedule, lr: float, limit: float
) -> str | None:
    """The mistake that gives the rates ``got`` of all ``steps``, each within ``limit``."""
    return next(
        (
            sentence
            for sentence, factor in MISTAKES.items()
            if all(
                abs(rate - lr * factor(schedule, step)) <= limit
                for rate, step in zip(got, steps, strict=True)
            )
        ),
        None,
    )
