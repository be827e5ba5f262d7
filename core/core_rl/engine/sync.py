"""`sync_weights`: weights from a train engine to an inference engine, by any method that both have.

`WeightUpdates` is the inference engine's side: its updates, in order, in a thread of their own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import DeltaRefused, WeightsError, raise_all
from core_rl.weight_sync.rendezvous import abandon, expecting, forget_error

logger = logging.getLogger(__name__)

POLL_S = 0.1
CLOSE_WAIT_S = 10.0
"""Seconds for an update to end once it waits for no sender any more."""
INTERRUPT_WAIT_S = 2.0
"""Seconds that the receiver may take to end after Ctrl-C in the sender."""


class WeightSender(Protocol):
    """A `TrainEngine` of one rank, or an `EngineGroup`."""

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights."""


class WeightReceiver(Protocol):
    """An `InferenceEngine`."""

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Install an update; the future is done when the receiver has the weights."""


def sync_weights(
    sender: WeightSender,
    receiver: WeightReceiver,
    meta: WeightUpdateMeta,
    timeout_s: float | None = None,
    receiving: AbstractContextManager[None] | None = None,
) -> None:
    """Give ``receiver`` the weights of ``sender`` as ``meta.version``; returns when it has them.

    It receives them inside the context ``receiving``, such as a pause of its requests. Files are written before that;
    by other methods both sides work at the same time, inside it.

    Raises what either side raises; then the receiver has the weights and the version that it had. Where both fail,
    it is the sender's error, with the receiver's as its context. `TimeoutError` after ``timeout_s`` seconds.
    After Ctrl-C the receiver may still be ending; `InferenceEngine.destroy` waits for it.

    Where the receiver refuses the changes of an update with ``delta``, all weights are sent.
    """
    if meta.method == "disk":
        sender.upload_weights(meta)
    with receiving or nullcontext():
        try:
            _update(sender, receiver, meta, timeout_s)
        except DeltaRefused as error:
            logger.warning("sending all weights of version %d: %s", meta.version, error)
            full = replace(meta, rebase=True)
            if meta.method == "disk":
                sender.upload_weights(full)
            _update(sender, receiver, full, timeout_s)


def _update(
    sender: WeightSender, receiver: WeightReceiver, meta: WeightUpdateMeta, timeout_s: float | None
) -> None:
    """Install one update; raises `DeltaRefused` also where the sender has failed because of it."""
    arrival = receiver.update_weights(meta)
    arrival.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised here, or explained
    try:
        if meta.method != "disk":
            sender.upload_weights(meta)
    except BaseException as error:
        # It may have failed before it connected to the receiver, which would keep waiting.
        limit = math.inf if timeout_s is None else timeout_s
        abandon_until_done(meta, arrival, limit if isinstance(error, Exception) else INTERRUPT_WAIT_S)
        if isinstance(error, WeightsError) and arrival.done() and not arrival.cancelled():
            refusal = arrival.exception()
            if isinstance(refusal, DeltaRefused):
                raise refusal from error
        raise
    arrival.result(timeout_s)


class Arrival(Future[None]):
    """The outcome of an update, which knows whether anybody has asked for it."""

    is_read = False

    def result(self, timeout: float | None = None) -> None:
        self.is_read = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.is_read = True
        return super().exception(timeout)

    @property
    def unread_error(self) -> BaseException | None:
        """The error of a failed update that nobody has asked for."""
        unread = self.done() and not self.cancelled() and not self.is_read
        return super().exception() if unread else None


class WeightUpdates:
    """Calls ``install`` for each update, in the order of `submit`.

    An error that nobody read is raised by the next `submit` or `require_read`, and logged by `close`.
    """

    def __init__(self, install: Callable[[WeightUpdateMeta], None]) -> None:
        self._install = install
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="core-rl-weights")
        self._unfinished: list[tuple[WeightUpdateMeta, Arrival]] = []
        """Updates that are not done, and those whose error nobody has read."""

    def submit(self, meta: WeightUpdateMeta) -> Future[None]:
        """Queue an update; the future is done when it is installed, or has its error."""
        self.require_read()
        if meta.method != "disk":
            forget_error(meta)
        arrival = Arrival()
        self._unfinished.append((meta, arrival))
        self._thread.submit(self._run, meta).add_done_callback(partial(_pass_on, arrival))
        return arrival

    def require_read(self) -> None:
        """Raise `WeightsError`, once, for updates that failed, and whose error nobody has read."""
        problems = self._unread_errors()
        self._unfinished = [(meta, arrival) for meta, arrival in self._unfinished if not arrival.done()]
        raise_all(WeightsError, "an update failed before this call", problems)

    def _unread_errors(self) -> list[str]:
        return [
            f"version {meta.version}: {error}; call result() of the future that update_weights() returns"
            for meta, arrival in self._unfinished
            if (error := arrival.unread_error) is not None
        ]

    def _run(self, meta: WeightUpdateMeta) -> None:
        """Install an update; a sender that has not connected finds the error."""
        with nullcontext() if meta.method == "disk" else expecting(meta):
            self._install(meta)

    def close(self) -> None:
        """Cancel queued updates, and fail a waiting update.

        Any other ends by itself. After `CLOSE_WAIT_S` seconds this returns without it: it may wait much longer for a
        server that does not answer, until the backend is torn down.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        for problem in self._unread_errors():
            logger.error("an update of weights failed: %s", problem)
        for meta, update in self._unfinished:
            abandon_until_done(meta, update, CLOSE_WAIT_S)


def _pass_on(arrival: Arrival, done: Future[None]) -> None:
    if done.cancelled() or arrival.cancelled():
        arrival.cancel()
    elif error := done.exception():
        arrival.set_exception(error)
    else:
        arrival.set_result(None)


def abandon_until_done(meta: WeightUpdateMeta, update: Future[Any], timeout_s: float) -> None:
    """Return when ``update`` is done, or after ``timeout_s`` seconds; no sender will connect to its receiver."""
    deadline = time.monotonic() + timeout_s
    while not update.done() and time.monotonic() < deadline:
        if meta.method != "disk":
            abandon(meta)  # again: the receiver may not have opened its socket yet
        wait([update], POLL_S)
