"""Calls of what users write: reward functions, tools and environments, with a time limit and a name for errors."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from core_rl.errors import RolloutError

__all__ = ["call_user", "guarded", "name_of"]

_Value = TypeVar("_Value")


def name_of(function: object) -> str:
    """What to call ``function`` in a message."""
    return str(getattr(function, "__name__", type(function).__name__))


async def guarded(awaited: Awaitable[_Value], *, subject: str, timeout_s: float | None = None) -> _Value:
    """Await a user's code. What goes wrong is a `RolloutError` that names ``subject``, the original chained."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except RolloutError as error:
        raise RolloutError(f"{subject}: {error}") from error
    except Exception as error:
        if limit.expired():
            raise RolloutError(f"{subject} gave no answer in {timeout_s} s") from error
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
