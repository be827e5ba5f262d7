"""The checkpoints of a run: begun at the end of a step, and put in place while or after the next one trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_rl.checkpoint.run import PendingCheckpoint, RunCheckpoints
from core_rl.errors import CoreRLError, GroupError, RankFailed
from core_rl_trainer.run.signals import DeferredInterrupt

logger = logging.getLogger(__name__)


class RunSaver:
    """Writer of run checkpoints, one at a time. Until it is in place, the previous one is the run's newest."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        wait_for_parts: Callable[[], None],
        saved: Callable[[int, Path], None],
    ) -> None:
        """``wait_for_parts()`` returns when the engines have written theirs, or raises their error; ``saved(step,
        path)`` is called when a checkpoint is in place.
        """
        self._checkpoints = checkpoints
        self._wait_for_parts = wait_for_parts
        self._saved = saved
        self._pending: PendingCheckpoint | None = None
        self._at_work = False
        self._interrupt = DeferredInterrupt(self._is_busy)

    def begin(self, step: int, parts: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]) -> None:
        """Save ``step``; the engines may write on when this returns. Finishes the previous one."""
        self.finish()
        with self._working():
            self._pending = self._checkpoints.begin(step, parts, state)
        self._interrupt.raise_noted()

    def finish_if_written(self) -> None:
        """Put the checkpoint in place if all files are written. Raises `KeyboardInterrupt` for an earlier Ctrl-C."""
        self._interrupt.raise_noted()
        if self._pending is not None and self._pending.is_written:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint on its way, and put it in place. Raises `CheckpointError` where that fails."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._working():
            path = self._put_in_place(pending)
        self._saved(pending.step, path)
        self._interrupt.raise_noted()

    def _put_in_place(self, pending: PendingCheckpoint) -> Path:
        try:
            self._wait_for_parts()
        except GroupError as error:
            if isinstance(error, RankFailed) or not pending.is_written:  # else only the ranks are lost
                pending.abandon()
                raise
        except BaseException:
            pending.abandon()
            raise
        return pending.finish()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._at_work = True
        try:
            yield
        finally:
            self._at_work = False

    def _is_busy(self) -> bool:
        """Whether a checkpoint is on its way that is lost when the engines end."""
        return self._at_work or (self._pending is not None and not self._pending.is_written)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """On leaving, the checkpoint on its way is in place: also after an error, as far as the engines still live."""
        with self._interrupt.caught():
            try:
                yield
            except (
                BaseException
            ):  # at a signal too: the engines wait for their saves in any case when they end
                self._finish_after_error()
                raise
            self.finish()

    def _finish_after_error(self) -> None:
        step = self._pending.step if self._pending is not None else None
        try:
            self.finish()
        except CoreRLError as second:  # it must not hide the error that is on its way
            logger.warning("the checkpoint of step %s was not completed: %s", step, second)
