"""Tensors whose memory is given back while their contents wait in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage, nn

__all__ = ["HostCopies", "own_memory"]


class HostCopies:
    """Host copies of tensors whose device memory is freed, to be copied back later.

    Only storages are freed and made again: every tensor, view and parameter over them stays the
    object that it was, so an optimizer's state keeps its keys and a sharded module its shards. It is the
    same on the CPU, where nothing is gained, and nothing can pass that would fail elsewhere.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory behind ``tensors`` to the host, pinned for CUDA, and free it."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        taken = [(storage, _on_host(storage)) for storage in storages.values() if storage.nbytes()]
        _finish_copies(storage for storage, _ in taken)
        for storage, _ in taken:
            storage.resize_(0)
        self._copies += taken

    def give_back(self) -> None:
        """Make the memory again, with its contents."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        _finish_copies(storage for storage, _ in self._copies)
        self._copies.clear()


def _on_host(storage: UntypedStorage) -> Tensor:
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies(storages: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def own_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Give plain parameters that lie in a mapped file, or share a storage, memory that can be freed."""
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.resizable() or storage.nbytes() != parameter.nbytes:
            parameter.data = parameter.data.clone()
