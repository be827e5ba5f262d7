"""Calls of functions that users write: with a time limit, and with the line of the function in every error."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from core_rl.distributed.loop_thread import Handover, LoopThread, being_cancelled
from core_rl.errors import RolloutError

_Value = TypeVar("_Value")

OWN = Path(__file__).parent
ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions that end a program or an event loop unless caught, such as from ``exit()`` in a function."""

SLOW_S = 0.01
"""Seconds after which a call counts as slow."""
IDLE_S = 1.0
"""Seconds for which a thread waits for another call."""


def name_of(function: object) -> str:
    """The name of ``function`` in messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def code_of(function: object) -> CodeType | None:
    """The code of the user's function behind ``function``: wrappers name theirs as ``__wrapped__``.

    None for objects other than Python functions, and for functions of this package, whose lines do not help a user.
    """
    while (inner := getattr(function, "__wrapped__", None) or getattr(function, "func", None)) is not None:
        function = inner
    for candidate in (
        function,
        getattr(function, "__func__", None),
        getattr(type(function), "__call__", None),  # noqa: B004  (its code is read, nothing is called)
    ):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return None if Path(code.co_filename).parent == OWN else code
    return None


def place_of(function: object, lines: Iterable[tuple[FrameType, int]] = ()) -> str:
    """``" (file.py:12)"``: the innermost of ``lines`` in the file of ``function``, else where it is defined.

    Empty where there is no Python function.
    """
    code = code_of(function)
    if code is None:
        return ""
    numbers = [line for frame, line in lines if frame.f_code.co_filename == code.co_filename]
    return f" ({Path(code.co_filename).name}:{numbers[-1] if numbers else code.co_firstlineno})"


def describe_error(error: BaseException, function: object) -> str:
    """Description of the error that ``function`` raised, with its line."""
    place = place_of(function, traceback.walk_tb(error.__traceback__))
    name = type(error).__name__
    message = f"raised {name}: {error}{place}" if str(error) else f"raised {name}{place}"
    if isinstance(error, ENDINGS):
        return f"{message}\nfix: return instead; around code that may call exit(), catch SystemExit"
    return f"{message}\nfix: correct that line, or handle completions like this one there"


async def guarded(
    awaited: Awaitable[_Value],
    *,
    subject: str,
    timeout_s: float | None = None,
    function: object = None,
    setting: str = "the time limit",
) -> _Value:
    """Await a user's code, that of ``function``.

    Raises `RolloutError` that names ``subject`` for any error of it, the original chained; also for errors that would
    end the process. ``setting`` is what limits its time.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except RolloutError as error:
        raise RolloutError(f"{subject}: {error}") from error
    except (Exception, asyncio.CancelledError, *ENDINGS) as error:
        if limit.expired():
            raise RolloutError(
                f"{subject} gave no result in {timeout_s:g} s{_place_at_end(error, function)}\n"
                f"fix: look for a loop or a wait without an end there, or raise {setting}"
            ) from error
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        raise RolloutError(f"{subject} {describe_error(error, function)}") from error


def _place_at_end(error: BaseException, function: object) -> str:
    """Line of the call when it was cancelled; see `_note_place`."""
    cancelled = error.__cause__
    notes = getattr(cancelled, "__notes__", None)
    if cancelled is None or notes:
        return str(notes[-1]) if notes else place_of(function)
    return place_of(function, traceback.walk_tb(cancelled.__traceback__))


def _note_place(
    cancelled: asyncio.CancelledError, function: object, lines: Iterable[tuple[FrameType, int]]
) -> None:
    # A note, since `asyncio.timeout` of Python 3.11 knows no subclass of CancelledError.
    cancelled.add_note(place_of(function, lines))


class UserThreads:
    """Threads for plain functions of users. Belongs to one event loop.

    One thread runs call after call, and the results of many come back to the loop at one time. While calls are slow,
    threads are added, so that these run at once. They are daemons: a hanging call does not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._running: set[_Call] = set()
        self._handover = Handover()
        self._lock = threading.Lock()
        """Guards the threads' number, which is not 0 while calls wait."""
        self._threads = 0
        self._watched = False

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """``function(*args)``. A call that is given up is left behind in its thread, or not begun."""
        loop = asyncio.get_running_loop()
        call = _Call(partial(function, *args), loop.create_future())
        with self._lock:
            self._calls.put(call)
            idle = not self._threads
        if idle:
            self._add_thread()
        if not self._watched:
            self._watched = True
            loop.call_later(SLOW_S, self._watch, loop)
        try:
            value, error = await call.result
        except asyncio.CancelledError as cancelled:
            frame = sys._current_frames().get(call.thread) if call in self._running else None
            _note_place(cancelled, function, [] if frame is None else [*traceback.walk_stack(frame)][::-1])
            raise
        if error is not None:
            raise error
        return value

    def _add_thread(self) -> None:
        with self._lock:
            self._threads += 1
        threading.Thread(target=self._work, name="core-rl-user-code", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Add a thread for each slow call, as long as others wait."""
        waiting, now = self._calls.qsize(), time.monotonic()
        slow = sum(now - call.started > SLOW_S for call in self._running.copy())
        for _ in range(min(slow, waiting)):
            self._add_thread()
        self._watched = waiting > 0
        if self._watched:
            loop.call_later(SLOW_S, self._watch, loop)

    def _work(self) -> None:
        """In a thread: run calls until none has come for a while."""
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._calls.empty():
                        self._threads -= 1
                        return
                continue
            if not call.result.cancelled():
                self._run(call)

    def _run(self, call: _Call) -> None:
        call.thread, call.started = threading.get_ident(), time.monotonic()
        self._running.add(call)
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = call.work(), None
        except BaseException as error:  # noqa: BLE001  (the thread's boundary: the caller raises it)
            outcome = None, error
        self._running.discard(call)
        self._handover.set_result(call.result, outcome)


@dataclass(eq=False)
class _Call:
    """A call of a user's function."""

    work: Callable[[], Any]
    result: asyncio.Future[tuple[Any, BaseException | None]]
    thread: int = 0
    started: float = 0.0


async def call_user(
    function: Callable[..., Any],
    *args: Any,
    loop: LoopThread | None = None,
    threads: UserThreads | None = None,
) -> Any:
    """``function(*args)``: of a coroutine function on ``loop``, of any other in ``threads``.

    Without ``loop``, coroutines run on the running loop; without ``threads``, a plain function has a thread of its own.
    A plain function cannot be interrupted. An abandoned call is left behind in its thread, which
    does not keep the process alive.
    """
    if not is_coroutine_function(function):
        value = await (threads or UserThreads()).call(function, args)
    elif loop is not None:
        return await call_on_loop(loop, function, *args)
    else:
        value = function(*args)
    if not inspect.isawaitable(value):
        return value
    return await value if loop is None else await call_on_loop(loop, awaited, value)


def is_coroutine_function(function: object) -> bool:
    """Whether a call of ``function`` runs nothing yet; also for objects with such a ``__call__``."""
    if not isinstance(function, FunctionType | MethodType | partial):  # `inspect.isroutine` takes longer
        function = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function)


async def awaited(value: Awaitable[_Value]) -> _Value:
    """The result of ``value``, as a coroutine."""
    return await value


async def call_on_loop(loop: LoopThread, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Run a coroutine function on its own event ``loop``, so that a blocking call stalls only that loop."""
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()  # a caller that gives up leaves it as it is
    coroutine = function(*args)

    async def work() -> None:
        try:
            outcome.set_result((await coroutine, None))
        except BaseException as error:  # noqa: BLE001  (the loop's boundary: the caller raises it)
            outcome.set_result((None, error))

    running = loop.run(work())
    try:
        value, error = await asyncio.wrap_future(outcome)
        if error is not None:
            raise error
        return value
    except asyncio.CancelledError as cancelled:
        frame = getattr(coroutine, "cr_frame", None)
        _note_place(cancelled, function, [] if frame is None else [(frame, frame.f_lineno)])
        running.cancel()
        raise


async def gather_group(members: Iterable[Coroutine[Any, Any, _Value]]) -> list[_Value]:
    """The results of all ``members``, which run at once. When one fails, the others are ended before it is raised."""
    coroutines = list(members)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(member) for member in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if running := [task for task in tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
