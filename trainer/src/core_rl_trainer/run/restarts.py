"""``cluster.restarts``: restarts from the last checkpoint after lost ranks or machines."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from rich.console import Console

from core_rl.errors import ClusterError, CoreRLError, GroupError, RankDied, RankTimeout
from core_rl_trainer.logs.progress import print_line
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.run.run_directory import RunDirectory

logger = logging.getLogger(__name__)

LOSSES = (ClusterError, RankDied, RankTimeout)
"""Errors after which new ranks can do what these could not."""


class Restarts:
    """The restarts that a run has left, and a record of each in the terminal, the log and the run's directory."""

    def __init__(self, cluster: ClusterSection, directory: RunDirectory, console: Console) -> None:
        self._cluster = cluster
        self._directory = directory
        self._console = console
        self._done = 0

    def begin(self, error: CoreRLError, opened: bool) -> None:
        """Count a restart after ``error``; raises it again where no restart can help, or none is left.

        ``opened`` is true if the machines were there.
        """
        loss, limit = _loss(error), self._cluster.restarts
        if loss is None:
            raise error
        if not opened:
            if self._done:
                error.add_note(
                    "the same command goes on from the last checkpoint, also with fewer cluster.machines"
                )
            raise error
        if self._done >= limit:
            if limit:
                error.add_note(f"cluster.restarts = {limit}, and all of them were used")
            raise error
        logger.info("ranks were lost", exc_info=loss)
        self._done += 1
        self._record(loss)

    def _record(self, loss: GroupError) -> None:
        """Show the restart on the terminal, in the log and on the page."""
        checkpoint = self._directory.checkpoint()
        step = checkpoint.step if checkpoint is not None else 0
        start = f"the checkpoint of step {step}" if checkpoint is not None else "the beginning"
        reason = loss.message.partition("\n")[0]
        limit, number = self._cluster.restarts, self._cluster.number
        text = f"restart {self._done} of {limit}, from {start}, on {number}: {reason}"
        logger.info("%s", text)
        print_line(self._console, text)
        self._directory.add_restart(
            {
                "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
                "step": step,
                "machines": self._cluster.machines,
                "reason": reason,
            }
        )


def _loss(error: BaseException) -> GroupError | None:
    """The loss of ranks that led to ``error``: itself, or the first in its chain of causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LOSSES):
        cause = cause.__cause__
    return cause
