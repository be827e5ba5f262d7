"""Reward functions: what they look like, and how one is called."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from core_rl.errors import RolloutError

__all__ = ["RewardFn", "compute_reward"]


class RewardFn(Protocol):
    """Scores one answer, from token ids: a function that needs text decodes them.

    It may be a plain function, which runs in a thread of its own, or a coroutine function. ``data``
    is the sample that the loader gave, with whatever the function needs, such as ``answer``.
    """

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]
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
    longer than ``timeout_s``, or returns something else. A plain function cannot be interrupted: it
    is left behind in its thread, which does not keep the process alive.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            value = await _call(reward, prompt_ids, output_ids, data)
    except Exception as error:
        if limit.expired():
            raise RolloutError(
                f"{subject}: the reward function {name} gave no answer in {timeout_s} s"
            ) from error
        raise RolloutError(
            f"{subject}: the reward function {name} raised {type(error).__name__}: {error}"
        ) from error
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{subject}: the reward function {name} returned {value!r}, not a number"
        ) from error
    if not math.isfinite(number):
        raise RolloutError(f"{subject}: the reward function {name} returned {number}; rewards are finite")
    return number


async def _call(
    reward: RewardFn, prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]
) -> Any:
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004
        value: Any = reward(prompt_ids, output_ids, data)
    else:
        value = await _in_thread(lambda: reward(prompt_ids, output_ids, data))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run ``call`` in a daemon thread: a pool's thread that hangs would keep the process from ending."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  (the thread's boundary: the caller raises it)
            future.set_exception(error)

    # Running, so that a caller that gives up does not cancel it under the thread's hands.
    future.set_running_or_notify_cancel()
    threading.Thread(target=work, name="core-rl-reward", daemon=True).start()
    return await asyncio.wrap_future(future)
