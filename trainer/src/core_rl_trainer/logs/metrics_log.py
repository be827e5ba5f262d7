"""Metrics of a run: one JSON object a step, TensorBoard where it is installed, and further boards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from core_rl_trainer.logs.step_log import StepLog

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsBoard", "MetricsLog", "Row"]

logger = logging.getLogger(__name__)

Row = dict[str, float | None]


class MetricsBoard(Protocol):
    """Something else that shows the rows of ``metrics.jsonl``."""

    def write(self, row: Mapping[str, float | None]) -> None:
        """Show a row; None stands for a number that is not finite."""

    def close(self) -> None:
        """Called once, after the last row."""


class MetricsLog:
    """Appends to ``metrics.jsonl``, ``tensorboard/`` and ``boards``, continuing after ``step``. See `StepLog`."""

    def __init__(self, directory: Path, step: int, boards: Sequence[MetricsBoard] = ()) -> None:
        self._log = StepLog(directory / "metrics.jsonl", step)
        self._tensorboard = _tensorboard(directory / "tensorboard", step)
        self._boards = boards

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for board in self._boards:
            board.close()

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return self._log.rows

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of ``step``; numbers that are not finite become null, since JSON has none.

        Raises `CheckpointError` when it cannot be written, for example on a full disk.
        """
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._log.append(row)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        for board in self._boards:
            board.write(row)

    def sync(self) -> None:
        """Return when all rows are on the disk; called before a checkpoint says that they are."""
        self._log.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()


def _tensorboard(directory: Path, step: int) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning(
            "TensorBoard is not installed, metrics go to metrics.jsonl only; pip install tensorboard"
        )
        return None
    # Events of later steps, from before an interruption, are hidden.
    return SummaryWriter(str(directory), purge_step=step + 1)
