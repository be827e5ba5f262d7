"""Signals that end a run: SIGTERM and SIGUSR1 at the end of a step, Ctrl-C as soon as no checkpoint is on its way.

A second signal ends the run at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from core_rl_trainer.errors import StoppedBySignal

__all__ = ["DeferredInterrupt", "EndedBySignal", "StopSignals"]

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of job schedulers before a kill: Slurm's ``--signal=USR1@120`` and its own SIGTERM, Kubernetes' SIGTERM."""


class EndedBySignal(KeyboardInterrupt):
    """A signal that ends the run at once: like Ctrl-C, and like it nothing that ``except Exception`` swallows."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended at once by {number.name}")
        self.number = number


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
        mine = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
        if threading.current_thread() is not threading.main_thread():
            mine = []
        for number in mine:
            signal.signal(number, self._handle)
        try:
            yield
        except EndedBySignal as ended:
            if self._again:
                raise
            raise StoppedBySignal(
                f"stopped by {ended.number.name} outside of the steps, with nothing to save; the same command goes on"
            ) from None
        finally:
            for number in mine:
                signal.signal(number, signal.SIG_DFL)

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

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside the context, Ctrl-C is handled here, in the main thread and where Python's own handler is."""
        mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not mine or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

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
