"""Reward functions and filters: loading them by name, and checking their results."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from core_rl.errors import ConfigError, RolloutError
from core_rl.registry.objects import load_object
from core_rl_trainer.data.plain import shown
from core_rl_trainer.rewards.calls import call_user, guarded, name_of, place_of

if TYPE_CHECKING:
    from core_rl.data.batch import SequenceBatch

LIMIT = "rollout.reward_timeout_s"
"""The setting that limits the time of a reward."""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class RewardFn(Protocol):
    """Scores one completion, from token ids: a function that needs text decodes them.

    It may be a plain function, which runs in a thread, a coroutine function, or either of
    them in other processes (`core_rl_trainer.rewards.process.ProcessReward`). ``data`` is the sample that the
    loader gave, with whatever the function needs, such as ``answer``. None: it does not apply to this sample.
    """

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any], /
    ) -> float | Awaitable[float | None] | None: ...


class BatchedRewardFn(Protocol):
    """Scores the completions of one prompt together, such as with a judge model, or relative to each other.

    Returns a number for each of ``completions``, in their order. Otherwise as `RewardFn`.
    """

    def __call__(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], data: Mapping[str, Any], /
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]: ...


async def compute_reward(
    reward: RewardFn,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    data: Mapping[str, Any],
    *,
    subject: str,
    timeout_s: float | None = None,
) -> float | None:
    """Call ``reward`` and return a finite float, or None where it does not apply.

    Raises `RolloutError` that names ``subject`` when it raises (the original is chained), takes
    longer than ``timeout_s``, or returns something else.
    """
    subject = f"{subject}: the reward function {name_of(reward)}"
    called = call_user(reward, prompt_ids, output_ids, data)
    value = await guarded(called, subject=subject, timeout_s=timeout_s, function=reward, setting=LIMIT)
    return as_result(value, subject, reward)


async def compute_rewards(
    reward: BatchedRewardFn,
    prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
    data: Mapping[str, Any],
    *,
    subject: str,
    timeout_s: float | None = None,
) -> list[float | None]:
    """Call ``reward`` once for all ``completions``. Raises as `compute_reward` does."""
    subject = f"{subject}: the reward function {name_of(reward)}"
    called = call_user(reward, prompt_ids, completions, data)
    value = await guarded(called, subject=subject, timeout_s=timeout_s, function=reward, setting=LIMIT)
    return as_results(value, subject, reward, len(completions))


def as_reward(value: object, subject: str, function: object = None) -> float:
    """``value`` as a float in the range of float32, or a `RolloutError` that begins with ``subject``.

    It names the line of ``function``.
    Arrays and tensors of one element are numbers, as truth values are. A text is none.
    """
    number = None if np.ma.is_masked(value) else _number(value)
    if number is None:
        batched = ", or set 'batched: true' in 'rewards'" if isinstance(value, list | tuple) else ""
        raise RolloutError(
            f"{subject} returned {shown(value)}, not a number{place_of(function)}\n"
            f"fix: return a float for every completion{batched}"
        )
    if not abs(number) <= FLOAT32_MAX:
        raise RolloutError(
            f"{subject} returned {shown(value)}; rewards are finite, and in the range of float32{place_of(function)}\n"
            "fix: return a finite number"
        )
    return number


def _number(value: object) -> float | None:
    """``value`` as a float, infinite where it is beyond floats; None for another value."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:  # of NumPy or torch
        with suppress(ValueError, RuntimeError):  # several elements, or none
            value = value.item()
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def as_result(value: object, subject: str, function: object) -> float | None:
    """``value`` as a float, or None where the reward does not apply. Raises `RolloutError` as `as_reward` does."""
    return None if value is None else as_reward(value, subject, function)


def as_results(value: object, subject: str, function: object, count: int) -> list[float | None]:
    """``value``, a list, array or tensor, as ``count`` floats or None; else a `RolloutError`, as of `as_reward`."""
    values = value.tolist() if hasattr(value, "tolist") else value
    fix = "fix: return a list with a float for each completion, in their order"
    if not isinstance(values, list | tuple):
        raise RolloutError(
            f"{subject} returned {shown(value)}, not a list of {count} numbers{place_of(function)}\n{fix}"
        )
    if len(values) != count:
        raise RolloutError(
            f"{subject} returned a list of length {len(values)} for {count} completions{place_of(function)}\n{fix}"
        )
    return [as_result(number, f"{subject}, for completion {n},", function) for n, number in enumerate(values)]


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
