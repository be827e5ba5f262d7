"""Delta weight sync by ``disk``: a checkpoint directory of the kind ``delta`` in place of a model directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors
from core_rl.checkpoint.directory import open_checkpoint, write_checkpoint
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointMismatch

__all__ = ["DeltaUpdate", "open_delta_update", "write_changes"]

KIND = "delta"


def write_changes(path: str, changes: NamedTensors, world: Comm, *, is_writer: bool) -> None:
    """Replace the update at ``path`` with ``changes``, the stream of `DeltaEncoder.encode`; collective.

    Raises as `write_checkpoint`.
    """

    def write(directory: Path) -> None:
        write_tensors(directory, KIND, changes, writes=is_writer)

    write_checkpoint(path, write, world, kind=KIND)


class DeltaUpdate:
    """An update by ``disk`` with ``delta``: a model directory, or changes."""

    def __init__(self, directory: Path) -> None:
        """Raises `CheckpointMismatch` for a directory that is neither."""
        self.directory = directory
        kind = read_manifest(directory).kind
        if kind not in ("hf", KIND):
            raise CheckpointMismatch(f"{directory} is a checkpoint of kind {kind!r}, not 'hf' or {KIND!r}")
        self.is_full = kind == "hf"
        """Whether it is a model directory."""
        self._files = TensorFiles(directory, "model" if self.is_full else KIND)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The items for `DeltaDecoder.decode`: full tensors, or changes."""
        return ((name, self._files.read(name)) for name in self._files.names())


@contextmanager
def open_delta_update(meta: WeightUpdateMeta) -> Iterator[DeltaUpdate]:
    """The update in ``meta.path``; raises as `open_checkpoint`. Digests of files are compared by ``verify`` alone."""
    with open_checkpoint(meta.path or "", Comm(), kind=None, digests=meta.verify) as directory:
        yield DeltaUpdate(directory)
