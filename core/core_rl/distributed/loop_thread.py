"""An asyncio event loop in a thread of its own, and results that threads give to event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from core_rl.errors import EngineStateError, RolloutError

CLOSE_TIMEOUT_S = 30.0

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines that threads hand in, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop."""
        self._loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run ``work`` on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(_observed(work), self._loop)

    def wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of ``work``, which runs on the loop; for other threads."""
        return self.run(work).result()

    def check_caller(self) -> None:
        """Raise `EngineStateError` on the loop itself: there, waiting for the loop would never end."""
        if threading.current_thread() is self._thread:
            raise EngineStateError(
                "a workflow called a blocking method of its engine; await agenerate() instead"
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel everything and end the thread, by default within `CLOSE_TIMEOUT_S`. Further calls do nothing.

        Raises `RolloutError` when something blocks the loop and cannot be cancelled.
        """
        self.check_caller()
        if not self._thread.is_alive():
            return
        # A blocked loop never gets to this, so the thread is waited for and not the call.
        self.run(self._cancel_all()).add_done_callback(lambda _: self.soon(self._loop.stop))
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RolloutError(
                f"an episode blocks the rollout thread for {timeout_s:g} s and cannot be cancelled; "
                "a workflow awaits what takes long, or runs it in a thread"
            )

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Handover:
    """Sets futures of event loops from threads, many at one time: each call of a loop costs more than its results."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]]
        self._ready = defaultdict(list)

    def set_result(self, future: asyncio.Future[_Result], result: _Result) -> None:
        """Set ``future`` on its loop, unless it is cancelled."""
        loop = future.get_loop()
        with self._lock:
            self._ready[loop].append((future, result))
            first = len(self._ready[loop]) == 1
        if first:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._set_results, loop)

    def _set_results(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ready = self._ready.pop(loop)
        for future, result in ready:
            if not future.done():
                future.set_result(result)


async def _observed(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await ``work``; its error is read even if the caller has cancelled the future, or asyncio would log it."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await work


def being_cancelled() -> bool:
    """True if this task itself is cancelled, and not only an awaited task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
