"""Objects as a pickle and the buffers of the tensors in it, which are sent and received without a copy.

Pickle's protocol 5 (PEP 574) leaves buffers out of its stream; torch's own way to pickle a tensor copies it, into the
stream and out of it, and takes the whole storage behind a view.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from core_rl.distributed.channel import Buffer

__all__ = ["bytes_of", "packed", "tensor_of", "unpacked"]

SMALLEST_BYTES = 4096
"""Smaller buffers go into the stream."""


def packed(value: object) -> list[Buffer]:
    """The pickle of ``value``, and the buffers that it refers to: they are to be sent before the tensors change.

    Raises what `pickle` raises for what it cannot take.
    """
    buffers: list[Buffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SMALLEST_BYTES:
            return True  # in the stream
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return [memoryview(stream.getvalue()), *buffers]  # `getbuffer` in a cycle crashes the collector of 3.12.1


def unpacked(parts: Iterable[Buffer]) -> Any:
    """The object of `packed`. Its tensors lie in the memory of ``parts``, which is theirs.

    Of an iterator it takes what belongs to this object, so that several may follow each other.
    """
    buffers = iter(parts)
    return pickle.loads(next(buffers), buffers=buffers)  # noqa: S301 - from a process of the same run


class _Pickler(pickle.Pickler):
    """Plain tensors on the CPU are a buffer with a dtype and a shape; others are pickled as torch does it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        return tensor_of, (pickle.PickleBuffer(bytes_of(value)), value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a plain tensor on the CPU, or of a copy that is contiguous."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def tensor_of(data: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose `bytes_of` are ``data``, in the same memory."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
