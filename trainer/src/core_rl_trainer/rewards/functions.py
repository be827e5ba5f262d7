"""Reward functions: what they look like, and how one is called."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from core_rl.errors import RolloutError
from core_rl_trainer.rewards.calls import call_user, guarded, name_of

__all__ = ["RewardFn", "as_reward", "compute_reward"]


class RewardFn(Protocol):
    """Scores one answer, from token ids: a function that needs text decodes them.

    It may be a plain function, which runs in a thread of its own, a coroutine function, or either of
    them in other processes (`core_rl_trainer.rewards.process.ProcessReward`). ``data`` is the sample that the
    loader gave, with whatever the function needs, such as ``answer``.
    """

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any], /
    ) -> float | Awaitable[float]: ...


async def compute_reward(
    reward: RewardFn,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    data: Mapping[str, Any],
    *,
    subject: str,
    timeout_s: float | None = None,
) -> float:
    """Call ``reward`` and return a finite float.

    Raises `RolloutError` that names ``subject`` when it raises (the original is chained), takes
    longer than ``timeout_s``, or returns something else.
    """
    who = f"{subject}: the reward function {name_of(reward)}"
    called = call_user(reward, prompt_ids, output_ids, data)
    return as_reward(await guarded(called, subject=who, timeout_s=timeout_s), who)


def as_reward(value: object, subject: str) -> float:
    """``value`` as a finite float, or a `RolloutError` that begins with ``subject``."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{subject} returned {value!r}, not a number") from error
    if not math.isfinite(number):
        raise RolloutError(f"{subject} returned {number}; rewards are finite")
    return number
