"""Memory of the sender's GPU that processes on the same machine open by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from core_rl.distributed.devices import expand_segments, segments_expand
from core_rl.weight_sync.accelerators import gpu_uuid

__all__ = ["DeviceMemory", "Opened", "device_bytes", "shared_with"]

DEVICE = 6
"""The place of the device's number among the arguments of torch's ``rebuild_cuda_tensor``."""


@dataclass(frozen=True)
class DeviceMemory:
    """A flat buffer of a GPU, for one process that opens it once. Unpickling this opens nothing.

    torch frees the buffer when every process that it was given to has closed it.
    """

    arguments: tuple[Any, ...]
    """Those of torch's ``rebuild_cuda_tensor``, with the GPU's UUID for its number, which other processes may not
    share; SGLang's workers take either."""


def shared_with(flat: Tensor, readers: int) -> list[DeviceMemory]:
    """``flat`` for each of so many processes."""
    uuid = gpu_uuid(flat.device)
    found = []
    for _ in range(readers):
        _, arguments = reduce_tensor(flat)
        found.append(DeviceMemory((*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])))
    return found


class Opened:
    """Pickles as ``memory``, opened: the process that unpickles it gets a tensor [n] of uint8."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._arguments = memory.arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_cuda_tensor, self._arguments


def device_bytes(size: int, device: torch.device) -> Tensor:
    """A flat buffer [size] on ``device`` that CUDA IPC can share."""
    torch.cuda.ipc_collect()  # buffers that their readers have closed
    with _plain_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate outside of expandable segments.

    Their handles are file descriptors of this process (``pidfd_getfd``), which a process that is no child of it may
    not take where ptrace is restricted, as by default on Ubuntu and in containers.
    """
    if not segments_expand():
        yield
        return
    expand_segments(False)
    try:
        yield
    finally:
        expand_segments(True)
