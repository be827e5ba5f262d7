"""`RequestGate`, which admits requests to an inference engine, and the other parts that no backend can change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from core_rl.config.capability import Capability
from core_rl.engine.guards import require_capability
from core_rl.errors import EngineStateError, RolloutError
from core_rl.registry.spec import EngineSpec

__all__ = ["InferenceComponents", "RequestGate"]


class RequestGate:
    """Blocks requests while the engine is paused, and refuses them while its memory is released or their rid is in use.

    Its methods may be called from any thread; `wait` from any event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Future[None] | None = None
        """Done when the engine resumes; None while it is not paused."""
        self._in_flight = 0
        self._rids: set[str] = set()
        """Of the requests that wait or are in flight."""
        self._released = False

    @property
    def is_open(self) -> bool:
        """Whether requests pass; false while paused."""
        return self._opened is None

    def close(self) -> bool:
        """Block requests until `open`; false if they are blocked already."""
        with self._lock:
            if self._opened is not None:
                return False
            self._opened = Future()
            return True

    def open(self) -> None:
        """Let the waiting requests pass."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.set_result(None)

    async def wait(self) -> None:
        """Return when the gate is open."""
        while (opened := self._opened) is not None:
            # Shielded: one cancelled request must not open the gate for the others.
            await asyncio.shield(asyncio.wrap_future(opened))

    @contextmanager
    def named(self, rid: str) -> Iterator[None]:
        """Keep ``rid`` for one request. Raises `RolloutError` while another one has it."""
        with self._lock:
            if rid in self._rids:
                raise RolloutError(
                    f"a request with the rid {rid!r} is in flight already; give each request a rid of its own, or none"
                )
            self._rids.add(rid)
        try:
            yield
        finally:
            with self._lock:
                self._rids.discard(rid)

    def require_memory(self, method: str) -> None:
        """Raise `EngineStateError` while the memory is released."""
        if self._released:
            raise EngineStateError(f"{method} while the memory is released; call resume_memory() first")

    @contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Count a request in flight. Raises `EngineStateError` while the memory is released."""
        with self._lock:
            self.require_memory(method)
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def release_memory(self) -> None:
        """Refuse requests until `resume_memory`. Raises `EngineStateError` while some are in flight."""
        with self._lock:
            if self._in_flight:
                raise EngineStateError(
                    f"release_memory() with {self._in_flight} requests in flight; wait for them"
                )
            self._released = True

    def resume_memory(self) -> None:
        """Admit requests again."""
        self._released = False


@dataclass(frozen=True, kw_only=True)
class InferenceComponents:
    """Parts of `InferenceEngine` that no backend can change; the suite's own tests plant bugs in them."""

    gate: Callable[[], RequestGate] = RequestGate
    require_capability: Callable[[EngineSpec, Capability, str], None] = require_capability
