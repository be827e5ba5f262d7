"""The life of a process that computes rewards: take the function, answer calls, end with the driver."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from core_rl.launch.worker import end_with_driver

__all__ = ["worker_main"]


def worker_main(connection: Connection) -> None:
    """Answer each message with ``(True, value)``, or ``(False, what went wrong)``; the first one holds the function."""
    end_with_driver()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver closed its end
        pickled, functions = connection.recv(), []
        connection.send(_outcome(lambda: functions.append(pickle.loads(pickled))))  # noqa: S301 (the driver's)
        while functions:
            connection.send(_outcome(_reward, functions[0], connection.recv()))


def _outcome(work: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        return True, work(*args)
    except Exception as error:  # noqa: BLE001  (the process boundary: the driver raises it)
        return False, f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"


def _reward(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    value = function(*args)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return float(value)


async def _awaited(value: Any) -> Any:
    return await value
