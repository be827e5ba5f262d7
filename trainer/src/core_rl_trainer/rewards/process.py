"""`ProcessReward`: a reward function in processes of its own, which can be killed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from core_rl.errors import ConfigError, EngineStateError, GroupError, RankDied, RankTimeout, RolloutError
from core_rl.launch.hosts import LocalHosts, Slot
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool
from core_rl_trainer.rewards.calls import ENDINGS, awaited, code_of, describe_error, name_of, place_of
from core_rl_trainer.rewards.functions import LIMIT, as_result, as_results

START_TIMEOUT_S = 120.0
"""Time limit for a process to import the function."""


class ProcessReward:
    """Runs ``fn`` in ``processes`` of its own, each call for at most ``timeout_s`` seconds.

    For functions that hang, crash or hold the interpreter lock: a call that takes longer is an error, and its
    process is killed with all of its children; the next call gets a new one. So is a process that dies. The time
    in which a call waits for a free process does not count. Awaiting a call runs it; it takes any
    arguments that can be pickled, and ``fn``, a plain or a coroutine function, can be pickled too. A ``batched`` one
    returns a list with a number for each completion of its last argument but one.

    Processes end with `close`, and with the process that made them, however that ends. A script that makes them
    needs the ``__main__`` guard.
    """

    def __init__(
        self, fn: Callable[..., Any], *, processes: int = 1, timeout_s: float, batched: bool = False
    ) -> None:
        if processes < 1 or timeout_s <= 0:
            raise ConfigError(
                f"ProcessReward(processes={processes}, timeout_s={timeout_s}); both must be positive"
            )
        self.__name__ = name_of(fn)
        self.__wrapped__ = fn
        try:
            pickled = pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the reward function {self.__name__} cannot be sent to another process: {error}; "
                "write it as a function of a module"
            ) from error
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._workers = [_Worker(fn, pickled, batched, self._closed) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread for each process: a call waits in the threads' queue until a process is free.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="core-rl-reward")

    async def __call__(self, *args: Any) -> Any:
        """The reward, or the list of rewards. Raises `RolloutError` where the function raises, hangs or crashes."""
        if self._closed.is_set():
            raise EngineStateError(f"the processes of the reward function {self.__name__} are closed")
        return await asyncio.wrap_future(self._threads.submit(self._call, args))

    def _call(self, args: tuple[Any, ...]) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(args, self._timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the processes, also those at work, and end the threads. Further calls do nothing."""
        self._closed.set()
        for worker in self._workers:
            worker.pool.close(wait_s=0.0)
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Worker:
    """One process, started when it is needed. One thread calls; any may close its ``pool``."""

    def __init__(
        self, fn: Callable[..., Any], pickled: bytes, batched: bool, closed: threading.Event
    ) -> None:
        self._fn, self._pickled, self._batched = fn, pickled, batched
        self._closed = closed
        self.pool = RankPool(LocalHosts())

    def call(self, args: tuple[Any, ...], timeout_s: float) -> Any:
        """The result for ``args``; raises `RolloutError`, and the process has ended unless the function raised it."""
        try:
            if not self.pool.pids:
                self._start()
            fine, result = self._ask(_rewards, (self._pickled, args, self._batched), timeout_s)
        except GroupError as error:
            self.pool.close(wait_s=0.0)
            raise RolloutError(self._problem(error, timeout_s)) from error
        if not fine:
            raise RolloutError(result)
        return result

    def _start(self) -> None:
        """A new process that has imported the function; `RolloutError` where it cannot."""
        self.pool = RankPool(LocalHosts())
        if self._closed.is_set():  # close() may have come too early to see this pool
            raise GroupError("the processes are closed")
        self.pool.grow([Slot(0, 0)])
        fine, problem = self._ask(_load, (self._pickled,), START_TIMEOUT_S)
        if not fine:
            self.pool.close(wait_s=0.0)
            raise RolloutError(problem)

    def _ask(
        self, fn: Callable[..., tuple[bool, Any]], arguments: tuple[Any, ...], timeout_s: float
    ) -> tuple[bool, Any]:
        answer: tuple[bool, Any]
        (answer,) = self.pool.call(Call(0, "run_alone", (fn, arguments)), [()], timeout_s)
        return answer

    def _problem(self, error: GroupError, timeout_s: float) -> str:
        """The ``error`` of a call, in words about the function."""
        if self._closed.is_set():
            return "its processes were closed meanwhile"
        if isinstance(error, RankTimeout):
            return (
                f"gave no result in {timeout_s:g} s{self._line(error.traceback)}; its process was killed\n"
                f"fix: look for a loop or a wait without an end there, or raise {LIMIT}"
            )
        if isinstance(error, RankDied):
            end = error.message.removeprefix("rank 0 ").partition(" during ")[0]
            return (
                f"its process {end}{place_of(self._fn)}\n"
                "fix: look for os._exit(), a crash in compiled code, or too little memory"
            )
        return str(error)

    def _line(self, stacks: str) -> str:
        """The line of the function in ``stacks`` of all threads, of which the main thread's comes last."""
        code = code_of(self._fn)
        main = re.split("hread 0x", stacks)[-1]
        if code is None or (line := re.search(rf'"{re.escape(code.co_filename)}", line (\d+)', main)) is None:
            return place_of(self._fn)
        return f" ({Path(code.co_filename).name}:{line[1]})"


@functools.cache
def _function(pickled: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(pickled)  # noqa: S301 - the driver's
    return function


@functools.cache
def _event_loop() -> asyncio.Runner:
    """One event loop for all calls: clients and locks that a function keeps belong to the loop of their first use."""
    return asyncio.Runner()


def _load(pickled: bytes) -> tuple[bool, Any]:
    """Import the function: whether it is there, and else the problem."""
    return _outcome(pickle.loads, lambda: callable(_function(pickled)))


def _rewards(pickled: bytes, args: tuple[Any, ...], batched: bool) -> tuple[bool, Any]:
    """Whether the function gave a reward, or a list of them, and this; or else the problem."""
    function = _function(pickled)

    def checked() -> float | list[float | None] | None:
        value = function(*args)
        if inspect.isawaitable(value):
            value = _event_loop().run(awaited(value))
        if batched:
            return as_results(value, "it", function, len(args[-2]))
        return as_result(value, "it", function)

    return _outcome(function, checked)


def _outcome(function: object, work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except RolloutError as error:
        return False, str(error)
    except (Exception, *ENDINGS) as error:  # noqa: BLE001  (the process boundary: the driver raises it)
        return False, describe_error(error, function)
