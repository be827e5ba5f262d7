"""Expected values on disk, by content: the next session and other workers read them."""

from __future__ import annotations

import hashlib
import os
import pickle
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from core_rl_oracle.oracle import Gradients
from core_rl_oracle.tolerance import Tolerance

ValueT = TypeVar("ValueT")

LARGEST = 512 * 2**20
"""Bytes that the files may take; files that were not read for longest go first."""


@dataclass(frozen=True)
class DiskCache:
    """Files in ``directory``; several processes may share it. ``code`` identifies what computes the values."""

    directory: Path
    code: str

    def get(self, key: str, compute: Callable[[], ValueT]) -> ValueT:
        """The value of ``key``, which has all inputs of ``compute``: from its file, or computed.

        Values are numbers, tensors, `Gradients` and `Tolerance` in lists, tuples and dicts.
        """
        path = self.directory / f"{hashlib.sha256(f'{self.code} {key}'.encode()).hexdigest()}.pt"
        try:
            with torch.serialization.safe_globals([Gradients, Tolerance]):
                value: ValueT = torch.load(path, weights_only=True)
            path.touch()  # read again, so it stays
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):  # none, or a broken one
            value = compute()
            self.directory.mkdir(parents=True, exist_ok=True)
            # Under another name first: a reader sees the whole file or none.
            unfinished = path.with_suffix(f".{uuid.uuid4().hex}")
            torch.save(value, unfinished)
            unfinished.replace(path)
        return value

    def trim(self, largest: int = LARGEST) -> None:
        """Delete the oldest files beyond ``largest`` bytes in all."""
        ages = sorted(
            ((stat.st_mtime, stat.st_size, path) for path, stat in _files(self.directory)), reverse=True
        )
        total = 0
        for _, size, path in ages:
            total += size
            if total > largest:
                path.unlink(missing_ok=True)


def _files(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """Files, except where another process deletes them at this moment."""
    files = []
    for path in directory.glob("*"):
        try:
            files.append((path, path.stat()))
        except FileNotFoundError:
            continue
    return files
