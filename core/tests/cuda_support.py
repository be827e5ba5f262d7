"""A GPU that is not there: the buffers, handles and UUID of a sender on CUDA."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from core_rl.weight_sync import buckets, cuda
from core_rl.weight_sync.cuda import CudaEnvironment

CUDA = torch.device("cuda", 0)
OWN = "gpu-of-the-trainer"
NCCL = (2, 27, 5)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def environment(
    nccl: tuple[int, ...] | None = NCCL,
    gpus: tuple[str, ...] = ("another",),
    visible: tuple[str, ...] = (OWN, "another"),
    torch_version: tuple[int, ...] = TORCH,
) -> CudaEnvironment:
    """The environment of a server, on another GPU of the same machine unless said otherwise."""
    return CudaEnvironment(torch=torch_version, nccl=nccl, gpus=gpus, visible=frozenset({*visible, *gpus}))


class FakeGpu:
    """Buffers in host memory, each opened once for each time that it was shared."""

    def __init__(self) -> None:
        self._buffers: list[weakref.ref[Tensor]] = []
        self._handles = itertools.count()
        self.open: dict[int, Tensor] = {}
        """Memory that readers may open, by the handle's number."""
        self.copies = 0
        """Copies of a whole buffer to the host."""

    @property
    def alive(self) -> int:
        """Buffers that the sender has not freed."""
        return sum(buffer() is not None for buffer in self._buffers)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        assert device == CUDA
        buffer = torch.zeros(size, dtype=torch.uint8)
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def reduce(self, flat: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Stand-in for torch's ``reduce_tensor``, with the number of the share for the handle."""
        number = next(self._handles)
        self.open[number] = flat.clone()
        storage = (torch.storage.TypedStorage, torch.uint8)
        place = (0, number, flat.numel(), 0, False, b"counter", 0, b"event", True)
        return reductions.rebuild_cuda_tensor, (Tensor, flat.size(), (1,), 0, *storage, *place)

    def rebuild(self, *arguments: Any) -> Tensor:
        """Stand-in for torch's ``rebuild_cuda_tensor``."""
        assert arguments[cuda.DEVICE] == OWN
        return self.open.pop(arguments[cuda.DEVICE + 1])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The sender's GPU is `OWN`, with NCCL 2.27.5."""
    fake = FakeGpu()
    staged = buckets.HostStaging.copy

    def counted(self: buckets.HostStaging, source: Tensor, target: Tensor) -> None:
        fake.copies += 1
        staged(self, source, target)

    def rebuild(*arguments: Any) -> Tensor:
        return fake.rebuild(*arguments)

    # Pickle finds it by its name.
    rebuild.__module__, rebuild.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
    for module in (reductions, cuda):
        monkeypatch.setattr(module, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(cuda, "nccl_version", lambda: NCCL)
    monkeypatch.setattr(cuda, "gpu_uuid", lambda device: OWN)
    monkeypatch.setattr(cuda, "reduce_tensor", fake.reduce)
    monkeypatch.setattr(buckets, "device_bytes", fake.allocate)
    monkeypatch.setattr(buckets.HostStaging, "copy", counted)
    return fake
