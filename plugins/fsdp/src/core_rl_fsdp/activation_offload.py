"""Activations that wait for the backward pass in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["activations_on_host"]

SMALLEST_BYTES = 1024
"""Smaller tensors stay where they are: moving one takes longer than it saves (torchtune keeps the same bound)."""


def activations_on_host() -> AbstractContextManager[None]:
    """Inside the context, what autograd saves is copied to host memory, pinned for CUDA, until it is needed.

    Parameters stay: they are there in any case, and a sharded module gathers them again itself. With
    gradient checkpointing, what is saved is the input of each block, and that is what moves. The
    values, and so the gradients, are the same bit for bit. (`torch.autograd.graph.save_on_cpu` would
    copy the gathered weights as well, and nothing at all on the CPU.)
    """
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


@dataclass(frozen=True)
class _OnHost:
    """A copy, and where it came from."""

    copy: Tensor
    device: torch.device


@dataclass(frozen=True)
class _PartsOnHost:
    """A tensor that is made of others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _pack(tensor: Tensor) -> Any:
    if _is_weight(tensor) or tensor.layout != torch.strided or tensor.nbytes < SMALLEST_BYTES:
        return tensor
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _pack(getattr(tensor, name)) for name in names}
        return _PartsOnHost(type(tensor), parts, context, tensor.size(), tensor.stride())
    # With the same strides: kernels choose their order of summation by them.
    pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    return _OnHost(copy.copy_(tensor.detach()), tensor.device)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _PartsOnHost):
        parts = {name: _unpack(part) for name, part in packed.parts.items()}
        whole: Tensor = packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)
        return whole
    if isinstance(packed, _OnHost):
        return packed.copy.to(packed.device, non_blocking=True)
    assert isinstance(packed, Tensor)
    return packed


def _is_weight(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter)
