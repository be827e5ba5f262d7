"""Reward functions and filters: loading them by name, and checking their results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.errors import ConfigError, RolloutError
from core_rl.registry.objects import load_object
from core_rl_trainer.rewards.calls import call_user, guarded, name_of, place_of

if TYPE_CHECKING:
    from core_rl.data.batch import SequenceBatch

__all__ = [
    "BatchedRewardFn",
    "RewardFn",
    "as_reward",
    "as_rewards",
    "compute_reward",
    "compute_rewards",
    "load_callable",
    "rewards_differ",
]

LIMIT = "rollout.reward_timeout_s"
"""The setting that limits the time of a reward."""
SHOWN = 120
"""Characters of a returned value that an error shows."""


class RewardFn(Protocol):
    """Scores one completion, from token ids: a function that needs text decodes them.

    It may be a plain function, which runs in a thread of its own, a coroutine function, or either of
    them in other processes (`core_rl_trainer.rewards.process.ProcessReward`). ``data`` is the sample that the
    loader gave, with whatever the function needs, such as ``answer``.
    """

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any], /
    ) -> float | Awaitable[float]: ...


class BatchedRewardFn(Protocol):
    """Scores the completions of one prompt together, such as with a judge model, or relative to each other.

    Returns a number for each of ``completions``, in their order. Otherwise as `RewardFn`.
    """

    def __call__(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], data: Mapping[str, Any], /
    ) -> Sequence[float] | Awaitable[Sequence[float]]: ...


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
    full_subject = f"{subject}: the reward function {name_of(reward)}"
    value = await _returned(reward, prompt_ids, output_ids, data, subject=full_subject, timeout_s=timeout_s)
    return as_reward(value, full_subject, place_of(reward))


async def compute_rewards(
    reward: BatchedRewardFn,
    prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
    data: Mapping[str, Any],
    *,
    subject: str,
    timeout_s: float | None = None,
) -> list[float]:
    """Call ``reward`` once for all ``completions``. Raises as `compute_reward` does."""
    full_subject = f"{subject}: the reward function {name_of(reward)}"
    value = await _returned(reward, prompt_ids, completions, data, subject=full_subject, timeout_s=timeout_s)
    return as_rewards(value, len(completions), full_subject, place_of(reward))


async def _returned(
    reward: Callable[..., object], *args: object, subject: str, timeout_s: float | None
) -> object:
    called = call_user(reward, *args)
    return await guarded(called, subject=subject, timeout_s=timeout_s, function=reward, setting=LIMIT)


def as_reward(value: object, subject: str, place: str = "") -> float:
    """``value`` as a finite float, or a `RolloutError` that begins with ``subject``. A text is no number."""
    if isinstance(value, str | bytes):
        raise RolloutError(_no_number(subject, value, place))
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RolloutError(_no_number(subject, value, place)) from error
    if not math.isfinite(number):
        raise RolloutError(
            f"{subject} returned {number}; rewards are finite{place}\nfix: return a finite number"
        )
    return number


def as_rewards(value: object, count: int, subject: str, place: str = "") -> list[float]:
    """``value``, a list, array or tensor, as ``count`` finite floats; else a `RolloutError`, as of `as_reward`."""
    values = value.tolist() if hasattr(value, "tolist") else value
    fix = "fix: return a list with a float for each completion, in their order"
    if not isinstance(values, list | tuple):
        shown = textwrap.shorten(repr(value), SHOWN)
        raise RolloutError(f"{subject} returned {shown}, not a list of {count} numbers{place}\n{fix}")
    if len(values) != count:
        raise RolloutError(
            f"{subject} returned a list of length {len(values)} for {count} completions{place}\n{fix}"
        )
    return [as_reward(number, f"{subject}, for completion {n},", place) for n, number in enumerate(values)]


def _no_number(subject: str, value: object, place: str) -> str:
    shown = textwrap.shorten(repr(value), SHOWN)
    batched = ", or set 'batched: true' in 'rewards'" if isinstance(value, list | tuple) else ""
    return (
        f"{subject} returned {shown}, not a number{place}\nfix: return a float for every completion{batched}"
    )


def rewards_differ(batch: SequenceBatch) -> bool:
    """Whether not all rewards of the group are equal: equal ones have no advantage over each other."""
    rewards = batch["rewards"]
    return bool((rewards != rewards[0]).any())


def load_callable(field: str, name: str) -> Any:
    """The callable that ``module:name`` or ``path/file.py:name``, the value of ``field``, names.

    Raises `ConfigError` if there is none.
    """
    loaded = load_object(name, f"{field} = {name!r}", ConfigError)
    if not callable(loaded):
        raise ConfigError(f"{field} = {name!r} is {loaded!r}, which cannot be called; name a function")
    return loaded
