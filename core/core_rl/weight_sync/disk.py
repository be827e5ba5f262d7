"""An update by ``disk``: `DiskUpdate`, through a model directory that is written before the receiver reads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from core_rl.backend.meta import SaveLoadMeta, WeightUpdateMeta
from core_rl.distributed.comm import Comm

__all__ = ["DiskUpdate"]


class DiskUpdate:
    """One update of weights through the directory ``meta.path``; reading and writing it are of checkpoints."""

    def __init__(self, meta: WeightUpdateMeta) -> None:
        self._path = meta.path or ""
        self._verify = meta.verify

    def send(self, save: Callable[[SaveLoadMeta], None]) -> None:
        """Write the directory by ``save``, a train engine's. Collective."""
        save(SaveLoadMeta(path=self._path, format="hf", with_optimizer=False))

    def receive(self, opened: Callable[..., AbstractContextManager[Path]]) -> AbstractContextManager[Path]:
        """Open the directory by ``opened`` of `core_rl.checkpoint.directory`; with ``verify`` digests are compared."""
        return opened(self._path, Comm(), kind="hf", require_manifest=self._verify, digests=self._verify)
