"""`ProcessReward`: a reward function in processes of its own, which can be killed."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Self

from core_rl.errors import ConfigError, EngineStateError, RolloutError
from core_rl.launch.process import start_process
from core_rl.launch.process_tree import ProcessTree
from core_rl.launch.worker import end_with_driver
from core_rl_trainer.rewards.calls import ENDINGS, awaited, describe_error, name_of, place_of
from core_rl_trainer.rewards.functions import LIMIT, as_reward, as_rewards

START_TIMEOUT_S = 120.0
"""Time limit for a process to start and to import the function."""
LINE_SIGNAL = signal.SIGVTALRM
"""Asks a process for the line that it is at; schedulers use other signals."""
LINE_TIMEOUT_S = 0.5
"""Time limit for a process to report its line; a process busy outside Python never does."""


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
        self._workers = [_Worker(pickled, batched, place_of(fn), self._closed) for _ in range(processes)]
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
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Worker:
    """One process, started when it is needed. One thread calls; any may kill."""

    def __init__(self, pickled: bytes, batched: bool, place: str, closed: threading.Event) -> None:
        self._pickled = pickled
        self._batched = batched
        self._place = place
        self._closed = closed
        self._process: BaseProcess | None = None
        self._tree: ProcessTree | None = None
        self._connection: Connection | None = None

    def call(self, args: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            if self._process is None:
                self._start()
            return self._request(args, timeout_s)
        except (EOFError, OSError) as error:
            code = self.stop()
            if self._closed.is_set():
                raise RolloutError("its processes were closed meanwhile") from error
            raise RolloutError(
                f"its process ended with exit code {code}{self._place}\n"
                "fix: look for os._exit(), a crash in compiled code, or too little memory"
            ) from error

    def _start(self) -> None:
        self._connection, child_end = Pipe()
        try:
            self._process = start_process(worker_main, (child_end, self._batched), "core-rl reward")
            assert self._process.pid is not None
            self._tree = ProcessTree(self._process.pid)
        finally:
            child_end.close()
        if self._closed.is_set():  # close() may have come too early to see this process
            self.kill()
        try:
            self._request(self._pickled, START_TIMEOUT_S)
        except RolloutError:
            self.stop()
            raise

    def _request(self, request: object, timeout_s: float) -> Any:
        assert self._connection is not None
        self._connection.send(request)
        if not self._connection.poll(timeout_s):
            place = self._current_line() or self._place
            self.stop()
            raise RolloutError(
                f"gave no result in {timeout_s:g} s{place}; its process was killed\n"
                f"fix: look for a loop or a wait without an end there, or raise {LIMIT}"
            )
        fine, result = self._connection.recv()
        if not fine:
            raise RolloutError(result)
        return result

    def _current_line(self) -> str | None:
        """The line that the process is at, if it reports it."""
        assert self._process is not None and self._process.pid is not None and self._connection is not None
        os.kill(self._process.pid, LINE_SIGNAL)
        if not self._connection.poll(LINE_TIMEOUT_S):
            return None
        fine, place = self._connection.recv()
        return None if fine else str(place)

    def kill(self) -> None:
        """Kill the process and its children, of whose group it is the leader once it is up."""
        if (tree := self._tree) is not None:
            tree.kill()

    def stop(self) -> int | None:
        """Kill the process, wait for its end and free its resources; returns the exit code."""
        if self._process is None:
            return None
        self.kill()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        if self._tree is not None:
            self._tree.close()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        return code


def worker_main(connection: Connection, batched: bool) -> None:
    """Answer each message with ``(True, value)``, or ``(False, message)``; the first one holds the function."""
    end_with_driver()
    functions: list[Callable[..., Any]] = []

    def report_line(_signal: int, frame: FrameType | None) -> None:
        lines = [] if frame is None else [*traceback.walk_stack(frame)][::-1]
        connection.send((False, place_of(functions[0], lines) if functions else ""))

    signal.signal(LINE_SIGNAL, report_line)
    # One event loop for all calls: clients and locks that a function keeps belong to the loop of their first use.
    with (
        asyncio.Runner() as runner,
        suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):  # the driver's end
        pickled = connection.recv()
        connection.send(_outcome(pickle.loads, lambda: functions.append(pickle.loads(pickled))))  # noqa: S301 (the driver's)
        while functions:
            args = connection.recv()
            connection.send(_outcome(functions[0], lambda: _rewards(functions[0], args, batched, runner)))  # noqa: B023 (called now)


def _outcome(function: object, work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except RolloutError as error:
        return False, str(error)
    except (Exception, *ENDINGS) as error:  # noqa: BLE001  (the process boundary: the driver raises it)
        return False, describe_error(error, function)


def _rewards(
    function: Callable[..., Any], args: tuple[Any, ...], batched: bool, runner: asyncio.Runner
) -> float | list[float | None] | None:
    value = function(*args)
    if inspect.isawaitable(value):
        value = runner.run(awaited(value))
    if batched:
        return as_rewards(value, len(args[-2]), "it", place_of(function))
    return None if value is None else as_reward(value, "it", place_of(function))
