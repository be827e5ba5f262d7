"""Threads for calls of code that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from queue import Empty, SimpleQueue

IDLE_S = 1.0
"""Seconds after which a thread without a call ends."""


class CallThreads:
    """Daemon threads for a call each: an idle thread takes the next call, and a new one starts where none is idle.

    A call that never returns keeps its thread, delays no other call, and does not keep the process alive, as the
    thread of an executor would.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_CallThread] = []

    def run(self, work: Callable[[], None]) -> threading.Thread:
        """Call ``work``, which raises nothing, in the thread that is returned."""
        while self._idle:
            try:
                thread = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if thread.is_alive():  # in a forked process it is not
                thread.calls.put(work)
                return thread
        thread = _CallThread(self._name, self._idle)
        thread.calls.put(work)
        thread.start()
        return thread


class _CallThread(threading.Thread):
    """Runs its calls, and is on the list ``idle`` between two of them."""

    def __init__(self, name: str, idle: list[_CallThread]) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        """Serve calls, each in a context of its own, until none comes for `IDLE_S`."""
        while (work := self._next()) is not None:
            Context().run(work)
            self._idle.append(self)

    def _next(self) -> Callable[[], None] | None:
        try:
            return self.calls.get(timeout=IDLE_S)
        except Empty:
            try:
                self._idle.remove(self)
            except ValueError:  # it was taken off the list for a call, which comes in a moment
                return self.calls.get()
            return None
