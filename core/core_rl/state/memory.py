"""Memory given back: of tensors whose contents wait on the host, and of blocks that the C library keeps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

RETAINED_BYTES = 2**27
"""Free memory of the C library up to which looking through it in each step costs more time than it is worth."""

CHUNK_BYTES = 2**28
"""Host memory is taken in pieces of this size: CUDA's pinned allocations are rounded up to a power of two."""


class HostCopies:
    """Host copies of tensors whose device memory is freed, to be copied back later.

    Only storages are freed and made again: every tensor, view and parameter over them stays the
    object that it was, so an optimizer's state keeps its keys and a sharded module its shards. It is the
    same on the CPU, where nothing is gained, and nothing can pass that would fail elsewhere.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[UntypedStorage, list[Tensor]]] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory behind ``tensors`` to the host, pinned for CUDA, and free it, for other processes as well."""
        by_memory = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        storages = [storage for storage in by_memory.values() if storage.nbytes()]
        host = _HostMemory(storages)
        taken = [(storage, host.take(storage.nbytes())) for storage in storages]
        for storage, pieces in taken:
            for part, piece in zip(_split(storage, pieces), pieces, strict=True):
                piece.copy_(part, non_blocking=True)
        _finish_copies(storages)
        for storage in storages:
            storage.resize_(0)
        for _, module in _accelerators(storages):
            module.empty_cache()
        self._copies += taken

    def give_back(self) -> None:
        """Make the memory again, with its contents."""
        for storage, pieces in self._copies:
            storage.resize_(sum(map(len, pieces)))
            for part, piece in zip(_split(storage, pieces), pieces, strict=True):
                part.copy_(piece, non_blocking=True)
        _finish_copies([storage for storage, _ in self._copies])
        self._copies.clear()


class _HostMemory:
    """Bytes of all ``storages``, in pieces of `CHUNK_BYTES` and a smaller one."""

    def __init__(self, storages: Sequence[UntypedStorage]) -> None:
        self._left = sum(storage.nbytes() for storage in storages)
        self._pinned = any(storage.device.type == "cuda" for storage in storages)
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> list[Tensor]:
        """Memory for ``count`` bytes."""
        pieces = []
        while count:
            if not len(self._free):
                size = min(CHUNK_BYTES, self._left)
                self._free = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
                self._left -= size
            pieces.append(self._free[:count])
            self._free = self._free[count:]
            count -= len(pieces[-1])
        return pieces


def _split(storage: UntypedStorage, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The bytes of ``storage``, cut as ``pieces`` are."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    parts: tuple[Tensor, ...] = data.split([len(piece) for piece in pieces])
    return parts


def _accelerators(storages: Iterable[UntypedStorage]) -> Iterator[tuple[torch.device, Any]]:
    """The devices with memory of their own, each with its module of torch; a test has another one."""
    for device in {storage.device for storage in storages}:
        if device.type != "cpu":
            yield device, torch.get_device_module(device)


def _finish_copies(storages: Iterable[UntypedStorage]) -> None:
    for device, module in _accelerators(storages):
        module.current_stream(device).synchronize()


def own_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Give plain parameters that lie in a mapped file, or share a storage, memory that can be freed."""
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.resizable() or storage.nbytes() != parameter.nbytes:
            parameter.data = parameter.data.clone()


def give_back_freed() -> None:
    """Return the pages of freed blocks to the system, if these have `RETAINED_BYTES`; does nothing without glibc 2.33.

    glibc keeps freed blocks below a block in use, up to 32 MiB each (M_MMAP_THRESHOLD in mallopt(3)): after a step,
    as much as the gradients of a model, and on equal ranks not equally much.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallinfo2"):
        return
    library.mallinfo2.restype = _HeapCounts
    if library.mallinfo2().fordblks >= RETAINED_BYTES:
        library.malloc_trim(0)


class _HeapCounts(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33; ``fordblks`` is the free part of the heap, in bytes."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )
