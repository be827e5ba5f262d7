"""Functions that users write: rewards, filters, tools. Loading them by name, and calling them with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from core_rl.errors import ConfigError, RolloutError
from core_rl.registry.objects import load_object

if TYPE_CHECKING:
    from core_rl.data.batch import SequenceBatch

__all__ = [
    "RewardFn",
    "as_reward",
    "call_user",
    "compute_reward",
    "guarded",
    "load_callable",
    "name_of",
    "rewards_differ",
]

_Value = TypeVar("_Value")


class RewardFn(Protocol):
    """Scores one completion, from token ids: a function that needs text decodes them.

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


def rewards_differ(batch: SequenceBatch) -> bool:
    """Whether not all rewards of the group are equal: equal ones have no advantage over each other."""
    rewards = batch["rewards"]
    return bool((rewards != rewards[0]).any())


def load_callable(field: str, name: str) -> Any:
    """The callable that ``module:name`` or ``path/file.py:name``, the value of ``field``, names.

    Raises `ConfigError` if there is none.
    """
    found = load_object(name, f"{field} = {name!r}", ConfigError)
    if not callable(found):
        raise ConfigError(f"{field} = {name!r} is {found!r}, which cannot be called; name a function")
    return found


def name_of(function: object) -> str:
    """The name of ``function`` in messages."""
    return str(getattr(function, "__name__", type(function).__name__))


async def guarded(awaited: Awaitable[_Value], *, subject: str, timeout_s: float | None = None) -> _Value:
    """Await a user's code. Raises `RolloutError` that names ``subject`` for any error of it, the original chained."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except RolloutError as error:
        raise RolloutError(f"{subject}: {error}") from error
    except Exception as error:
        if limit.expired():
            raise RolloutError(f"{subject} gave no result in {timeout_s} s") from error
        raise RolloutError(f"{subject} raised {type(error).__name__}: {error}") from error


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``: of a coroutine function on this loop, of any other in a thread of its own.

    A plain function cannot be interrupted. One that is given up is left behind in its thread, which
    does not keep the process alive.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        value = function(*args)
    else:
        value = await _in_thread(lambda: function(*args))
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
    threading.Thread(target=work, name="core-rl-user-code", daemon=True).start()
    return await asyncio.wrap_future(future)
