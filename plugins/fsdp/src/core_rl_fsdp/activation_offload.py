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

SMALLEST_BYTES = 1024
"""Smaller tensors stay where they are: moving one takes longer than it saves (torchtune keeps the same bound)."""


class HostCopy:
    """A copy of a tensor in host memory, and the previous copy."""

    def __init__(self, values: Tensor, device: torch.device, previous: HostCopy | None) -> None:
        self.values = values
        self.device = device
        """Device of the tensor."""
        self.previous = previous
        self.arrival: tuple[Tensor, Any] | None = None
        """The tensor on its way back, and the event of its arrival."""


class SideCopies:
    """Copies for which the computation does not wait, where the device has streams; on the CPU, plain ones.

    A backward pass asks for copies in the opposite order, nearly. While it computes with one, the one made before it
    is on its way.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last: HostCopy | None = None

    def forget(self) -> None:
        """Let the next copy be the first one."""
        self._last = None

    def to_host(self, tensor: Tensor) -> HostCopy:
        """A copy with the strides of ``tensor``: kernels choose their order of summation by them."""
        device = tensor.device
        values = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda", requires_grad=False)
        if device.type == "cpu":
            values.copy_(tensor.detach())
        else:
            module, stream = self._beside(device)
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                values.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(stream)  # or its memory were another tensor's before it is read
        self._last = HostCopy(values, device, self._last)
        return self._last

    def to_device(self, copy: HostCopy) -> Tensor:
        """The tensor again, on its device."""
        if copy.device.type == "cpu":
            return copy.values
        self._begin(copy)
        arrival, copy.arrival = copy.arrival, None
        assert arrival is not None  # begun just now
        tensor, arrived = arrival
        module, _ = self._beside(copy.device)
        current = module.current_stream(copy.device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        if copy.previous is not None:
            self._begin(copy.previous)
            copy.previous = None
        return tensor

    def _begin(self, copy: HostCopy) -> None:
        """Let ``copy`` go back to its device, unless it is on its way."""
        if copy.arrival is None:
            module, stream = self._beside(copy.device)
            with module.stream(stream):
                tensor = copy.values.to(copy.device, non_blocking=True)
                copy.arrival = tensor, stream.record_event()

    def _beside(self, device: torch.device) -> tuple[Any, Any]:
        """The module of torch for ``device``, and the stream of the copies."""
        module: Any = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        return module, self._streams[device]


class ActivationOffload:
    """Copies what autograd saves to host memory, pinned for CUDA, until it is needed; nothing waits for it.

    Weights stay: they are there in any case, and a sharded module gathers them again itself. With
    gradient checkpointing, only the inputs of blocks are saved and moved. The
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
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self._weights.add(local.untyped_storage()._cdata)

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
            tensor: Tensor = packed.kind.__tensor_unflatten__(
                parts, packed.context, packed.size, packed.stride
            )
            return tensor
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
