"""JSONL files of a run: a row at a time, and after an interruption as if there had been none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import CheckpointError

__all__ = ["StepLog", "read_steps"]

Row = dict[str, Any]


def read_steps(path: Path) -> list[Row]:
    """The complete rows of such a file; lines after a damaged one (a killed writer's) are left out."""
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


class StepLog:
    """Appends rows, each with its ``step``, to ``path``, continuing after ``step`` (-1: from the start).

    Rows of later steps, which a run wrote before it was interrupted, are removed: those steps come again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.rows = [row for row in read_steps(path) if (row.get("step") or 0) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in self.rows), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Add a row of JSON. Raises `CheckpointError` when it cannot be written, for example on a full disk."""
        self.rows.append(row)
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file.name}: {error.strerror}") from error

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
