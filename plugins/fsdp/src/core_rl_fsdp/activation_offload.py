"""Activations that wait for the backward pass in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from core_rl_fsdp.side_copies import HostCopy, SideCopies

__all__ = ["ActivationOffload"]

SMALLEST_BYTES = 1024
"""Smaller tensors stay where they are: moving one takes longer than it saves (torchtune keeps the same bound)."""


class ActivationOffload:
    """Copies what autograd saves to host memory, pinned for CUDA, until it is needed; nothing waits for it.

    Weights stay: they are there in any case, and a sharded module gathers them again itself. With
    gradient checkpointing, what is saved is the input of each block, and that is what moves. The
    values, and so the gradients, are the same bit for bit. (`torch.autograd.graph.save_on_cpu` would
    copy the gathered weights as well, and nothing at all on the CPU.)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """``modules`` have their weights gathered when their forward pass begins, and are final."""
        self._weights: set[int] = set()
        self._copies = SideCopies()
        for module in modules:
            # Not compiled: a compiled block runs its hooks inside.
            module.register_forward_pre_hook(torch.compiler.disable(self._note_weights))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, saved tensors move."""
        self._weights.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copies.forget()

    def _note_weights(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters():
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self._weights.add(held.untyped_storage()._cdata)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._pack(getattr(tensor, name)) for name in names}
            return _PartsOnHost(type(tensor), parts, context, tensor.size(), tensor.stride())
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        return self._copies.to_host(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PartsOnHost):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            whole: Tensor = packed.kind.__tensor_unflatten__(
                parts, packed.context, packed.size, packed.stride
            )
            return whole
        if isinstance(packed, HostCopy):
            return self._copies.to_device(packed)
        assert isinstance(packed, Tensor)
        return packed


@dataclass(frozen=True)
class _PartsOnHost:
    """A tensor that is made of others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
