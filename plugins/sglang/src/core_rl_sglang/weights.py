"""Where servers take weights from. What was installed last is kept, so that a server that is replaced gets it too."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.engines.collectives import World
from core_rl.engines.meta import WeightUpdateMeta
from core_rl.engines.named_tensors import check_source
from core_rl_sglang.server import Server

__all__ = ["DiskWeights", "Weights"]


class Weights(Protocol):
    """One version of the weights, which any number of servers can take, now and later."""

    version: int

    @property
    def origin(self) -> str:
        """The model path that a fresh server with them reports; empty if there is none."""
        ...

    async def load(self, server: Server, timeout_s: float) -> None:
        """Install them on ``server``, which is paused; raises the errors of its interface."""
        ...

    def discard(self) -> None:
        """Free what keeps them; no server will need them again."""
        ...


class DiskWeights:
    """A model directory that servers read themselves."""

    def __init__(self, directory: Path, version: int, *, temporary: bool = False) -> None:
        self.directory = directory
        self.version = version
        self._temporary = temporary

    @property
    def origin(self) -> str:
        return str(self.directory)

    @staticmethod
    def checked(meta: WeightUpdateMeta, shapes: dict[str, tuple[int, ...]]) -> DiskWeights:
        """The weights in ``meta.path``, which must be whole and hold tensors of these names and ``shapes``.

        Its files are linked into a directory beside it: trainers put each version in place of the one before,
        also while servers still read that one.

        Raises `CheckpointError` and `WeightsError` before any server hears of them.
        """
        assert meta.path is not None
        with opened(meta.path, World(), kind="hf", require_manifest=meta.verify) as directory:
            check_source(TensorFiles(directory, "model"), shapes, f"the weights in {meta.path!r}")
            return DiskWeights(_linked(directory), meta.version, temporary=True)

    async def load(self, server: Server, timeout_s: float) -> None:
        body = {
            "model_path": str(self.directory),
            "weight_version": str(self.version),
            "flush_cache": True,
        }
        await server.control("/update_weights_from_disk", body, timeout_s)
        server.version = self.version

    def discard(self) -> None:
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _linked(directory: Path) -> Path:
    """A directory beside ``directory`` with its files; copies where the file system has no hard links."""
    copy = Path(tempfile.mkdtemp(prefix=f".{directory.name}.served-", dir=directory.parent))
    try:
        shutil.copytree(directory, copy, copy_function=_link, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
