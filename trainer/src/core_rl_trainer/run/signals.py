"""Signals that end a run: SIGTERM and SIGUSR1 at the end of a step, Ctrl-C as soon as no checkpoint is on its way.

A second signal ends the run at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn, TypeAlias

from core_rl_trainer.errors import StoppedBySignal

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of job schedulers before a kill: Slurm's ``--signal=USR1@120`` and its own SIGTERM, Kubernetes' SIGTERM."""


class EndedBySignal(KeyboardInterrupt):
    """A signal that ends the run at once: like Ctrl-C, and like it nothing that ``except Exception`` swallows."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended at once by {number.name}")
        self.number = number


Handler: TypeAlias = Callable[[int, FrameType | None], None]


@contextmanager
def _handled(
    numbers: Sequence[signal.Signals], default: signal.Handlers | Handler, handler: Handler
) -> Iterator[None]:
    """Inside the context, ``handler`` gets the signals of the main thread that have the ``default`` handler."""
    in_main = threading.current_thread() is threading.main_thread()
    mine = [number for number in numbers if in_main and signal.getsignal(number) == default]
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, default)


class StopSignals:
    """Notes the first signal while the run takes steps; any other ends the run at once."""

    def __init__(self) -> None:
        self._noted: signal.Signals | None = None
        self._again = False
        self._in_steps = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside the context, signals that would kill this process stop the run instead.

        A program that handles them itself, or trains outside of its main thread, keeps its handlers. Raises
        `StoppedBySignal` where the first signal came outside of the steps, and `EndedBySignal` for a second one.
        """
        try:
            with _handled(SIGNALS, signal.SIG_DFL, self._handle):
                yield
        except EndedBySignal as ended:
            if self._again:
                raise
            raise StoppedBySignal(
                f"stopped by {ended.number.name} outside of the steps, with nothing to save; the same command goes on"
            ) from None

    @contextmanager
    def during_steps(self) -> Iterator[None]:
        """Inside the context, the first signal waits for the end of the step."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False

    @property
    def noted(self) -> bool:
        """Whether the run is to end after this step."""
        return self._noted is not None

    def raise_stopped(self, step: int) -> NoReturn:
        """Raise `StoppedBySignal` for the signal that has come; a checkpoint of ``step`` is there."""
        assert self._noted is not None
        raise StoppedBySignal(
            f"stopped by {self._noted.name} after step {step}, of which there is a checkpoint; the same command goes on"
        )

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self._again = self._noted is not None
        self._noted = self._noted or received
        if self._again or not self._in_steps:
            raise EndedBySignal(received)
        logger.warning(
            "%s: the run saves a checkpoint at the end of this step and ends; a second signal ends it at once",
            received.name,
        )


class DeferredInterrupt:
    """Ctrl-C while a checkpoint is on its way: the first waits for `raise_noted`, the second ends the run at once."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """``is_busy()`` is true while a checkpoint would be lost with the engines."""
        self._is_busy = is_busy
        self._noted = False

    def caught(self) -> AbstractContextManager[None]:
        """Inside the context, Ctrl-C is handled here, in the main thread and where Python's own handler is."""
        return _handled((signal.SIGINT,), signal.default_int_handler, self._handle)

    def raise_noted(self) -> None:
        """Raise `KeyboardInterrupt` for a Ctrl-C that has waited."""
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._noted or not self._is_busy():
            raise KeyboardInterrupt
        self._noted = True
        logger.warning(
            "Ctrl-C: the run ends when the checkpoint on its way is in place; a second Ctrl-C ends it at once"
        )
