"""Metrics of a run: one JSON object a step, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from core_rl.errors import CheckpointError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog", "read_metrics"]

logger = logging.getLogger(__name__)

Row = dict[str, float | None]


def read_metrics(path: Path) -> list[Row]:
    """The complete rows of a metrics file; what stands after a damaged line (a killed writer's) is left out."""
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append(row)
    return rows


class MetricsLog:
    """Appends to ``metrics.jsonl`` and ``tensorboard/`` in ``directory``, going on after ``step`` (-1: from the start).

    Rows of later steps, which a run wrote before it was interrupted, are removed: those steps come again.
    """

    def __init__(self, directory: Path, step: int) -> None:
        path = directory / "metrics.jsonl"
        self.rows = [row for row in read_metrics(path) if (row.get("step") or 0) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in self.rows), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(directory / "tensorboard", step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of ``step``; numbers that are not finite become null, since JSON has none.

        Raises `CheckpointError` when it cannot be written, for example on a full disk.
        """
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.rows.append(row)
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file.name}: {error.strerror}") from error
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Return when all rows are on the disk; called before a checkpoint says that they are."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


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
