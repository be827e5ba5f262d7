"""Metrics of a run: one JSON object a step, TensorBoard where it is installed, and further boards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from core_rl_trainer.logs.step_log import StepLog

__all__ = ["MetricsBoard", "MetricsLog", "Row", "TensorBoard"]

logger = logging.getLogger(__name__)

Row = dict[str, float | None]


class MetricsBoard(Protocol):
    """Something else that shows the rows of ``metrics.jsonl``."""

    def write(self, row: Mapping[str, float | None]) -> None:
        """Show a row; None stands for a number that is not finite."""

    def close(self) -> None:
        """Called once, after the last row."""


class TensorBoard:
    """Event files in ``directory``, continuing after ``step``; an `ImportError` where TensorBoard is not installed."""

    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of later steps, from before an interruption, are hidden.
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, row: Mapping[str, float | None]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, math.nan if value is None else value, int(row["step"] or 0))
        self._writer.flush()  # a checkpoint may follow, after which this row does not come again

    def close(self) -> None:
        self._writer.close()


class MetricsLog(StepLog):
    """Appends to ``metrics.jsonl``, ``tensorboard/`` and ``boards``, continuing after ``step``. See `StepLog`."""

    def __init__(self, directory: Path, step: int, boards: Sequence[MetricsBoard] = ()) -> None:
        super().__init__(directory / "metrics.jsonl", step)
        self._boards = list(boards)
        try:
            self._boards.append(TensorBoard(directory / "tensorboard", step))
        except ImportError:
            logger.warning(
                "TensorBoard is not installed, metrics go to metrics.jsonl only; pip install tensorboard"
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of ``step``; numbers that are not finite become null, since JSON has none.

        Raises `CheckpointError` when it cannot be written, for example on a full disk.
        """
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append(row)
        for board in self._boards:
            board.write(row)

    def close(self) -> None:
        """Close the file and the boards."""
        super().close()
        for board in self._boards:
            board.close()
