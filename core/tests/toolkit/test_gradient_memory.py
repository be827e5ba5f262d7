"""Memory of FSDP's gradients on a lone rank. CUDA is simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core_rl.toolkit.fully_sharded import InPlaceReduceScatter

CUDA = torch.device("cuda", 0)


class CudaTensor(Tensor):
    """Takes itself for memory of a GPU, and notes the streams that use it."""

    is_cuda = True
    streams: tuple[Any, ...] = ()

    def record_stream(self, stream: Any) -> None:
        self.streams = (*self.streams, stream)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[CudaTensor]:
    """Memory that was allocated on the GPU."""
    tensors: list[CudaTensor] = []
    plain_empty = torch.empty

    def empty(size: Any, *, dtype: torch.dtype, device: torch.device) -> CudaTensor:
        assert device == CUDA
        tensors.append(plain_empty(size, dtype=dtype).as_subclass(CudaTensor))
        return tensors[-1]

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"the stream of reductions on {device}")
    return tensors


def test_gradients_outlive_sums_in_another_stream(allocated: list[CudaTensor]) -> None:
    """Otherwise the next gradients overwrite them while a later micro-batch is added up."""
    memory = InPlaceReduceScatter()
    for _ in range(2):
        first = memory.allocate((6,), dtype=torch.float32, device=CUDA)
        second = memory.allocate((6,), dtype=torch.float32, device=CUDA)
        assert second is first
    assert [tensor.streams for tensor in allocated] == [("the stream of reductions on cuda:0",)] * 2
