"""Copies of activations to host memory and back, on a stream beside that of the computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "SideCopies"]


class HostCopy:
    """A copy of a tensor in host memory, and the one that was made before it."""

    def __init__(self, values: Tensor, device: torch.device, previous: HostCopy | None) -> None:
        self.values = values
        self.device = device
        """Where the tensor was."""
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
