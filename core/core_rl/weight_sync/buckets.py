"""Buckets: tensors at aligned places of one flat buffer, in shared memory or on the sender's accelerator."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core_rl.distributed.channel import Channel
from core_rl.errors import WeightsError
from core_rl.weight_sync.cuda import device_bytes
from core_rl.weight_sync.messages import REPLY_TIMEOUT_S, Bucket, shared_by_name

ALIGNMENT = 64
DIRECTORY = Path("/dev/shm")  # noqa: S108  # where Linux keeps it


class Filling:
    """A bucket that is being filled, on ``device``: on the CPU in shared memory."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._device = device
        self._flat: Tensor | None = None
        self.tensors: Bucket = []
        """Views of the buffer."""
        self.used = 0
        """Bytes up to the end of the last tensor."""

    @property
    def flat(self) -> Tensor:
        """The used part of the buffer: [used] uint8."""
        assert self._flat is not None  # it has a tensor
        return self._flat[: self.used]

    def fits(self, tensor: Tensor) -> bool:
        """A tensor that is larger than the limit gets a bucket of its own."""
        return not self.tensors or self._start() + tensor.nbytes <= self._limit

    def _start(self) -> int:
        return -(-self.used // ALIGNMENT) * ALIGNMENT

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` to the end; raises `WeightsError` where shared memory has no room for it."""
        on_cpu = self._device.type == "cpu"
        if on_cpu:
            require_shared_memory(tensor.nbytes, f"{name!r}")
        if self._flat is None:
            size = max(self._limit, tensor.nbytes, 1)
            self._flat = shared_bytes(size) if on_cpu else device_bytes(size, self._device)
        start = self._start()
        view = _view(self._flat, start, tensor)
        view.copy_(tensor.detach())
        self.tensors.append((name, view))
        self.used = start + tensor.nbytes

    def shared(self, staging: HostStaging) -> Bucket:
        """The tensors in shared memory: themselves, or views of one copy of the whole buffer by ``staging``."""
        if self._device.type == "cpu":
            return self.tensors
        require_shared_memory(self.used, f"a bucket from {self.tensors[0][0]!r} on")
        copy = shared_bytes(max(self.used, 1))[: self.used]
        staging.copy(self.flat, copy)
        return [(name, _view(copy, start_of(view), view)) for name, view in self.tensors]


class HostStaging:
    """Pinned memory through which buffers of an accelerator go to shared memory, the same for all of them."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` [n] on an accelerator into ``target`` [n] on the host; returns when it is there."""
        if self._pinned.numel() < source.numel():
            self._pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
        stage = self._pinned[: source.numel()]
        stage.copy_(source, non_blocking=True)
        if source.is_cuda:
            torch.cuda.current_stream(source.device).synchronize()
        target.copy_(stage)


def shared_bytes(size: int) -> Tensor:
    """A flat buffer [size] in shared memory."""
    with shared_by_name():
        storage = torch.UntypedStorage._new_shared(size)
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(storage, 0, (size,), (1,))


def flat_bytes(bucket: Bucket) -> Tensor:
    """The buffer of a ``bucket``, up to the end of its last tensor: [n] uint8."""
    _, last = bucket[-1]
    end = start_of(last) + last.nbytes
    flat = torch.empty(0, dtype=torch.uint8, device=last.device)
    return flat.set_(last.untyped_storage(), 0, (end,), (1,))


def start_of(tensor: Tensor) -> int:
    """The place of a bucket's ``tensor`` in its buffer, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from ``start`` on as a contiguous tensor of the shape and dtype of ``like``."""
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True, kw_only=True)
class RemoteBucket:
    """The description of a bucket, after whose message its bytes are sent."""

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """Names, dtypes, shapes, and places in bytes."""
    used: int
    """Bytes up to the end of the last tensor."""

    @staticmethod
    def of(bucket: Bucket) -> RemoteBucket:
        """The description of ``bucket``."""
        return RemoteBucket(
            tensors=tuple((name, t.dtype, tuple(t.shape), start_of(t)) for name, t in bucket),
            used=flat_bytes(bucket).numel(),
        )

    @staticmethod
    def send_bytes(bucket: Bucket, channel: Channel) -> None:
        """Send the bytes of ``bucket``; raises as `Channel.send`."""
        channel.send_bytes(flat_bytes(bucket).numpy().data, time.monotonic() + REPLY_TIMEOUT_S)

    def receive(self, channel: Channel) -> Bucket:
        """The bucket, in this machine's shared memory; raises as `Channel.receive`, and `WeightsError` without room."""
        require_shared_memory(self.used, f"a bucket from {self.tensors[0][0]!r} on")
        flat = shared_bytes(max(1, self.used))[: self.used]
        channel.receive_into(flat.numpy().data, time.monotonic() + REPLY_TIMEOUT_S)
        return [
            (name, flat[start : start + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape))
            for name, dtype, shape, start in self.tensors
        ]


def require_shared_memory(needed: int, subject: str) -> None:
    """Raise `WeightsError` where fewer than ``needed`` bytes are free for ``subject``; only Linux has such a limit."""
    if not DIRECTORY.is_dir():
        return
    space = os.statvfs(DIRECTORY)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    if free < needed:
        raise WeightsError(
            f"{subject} needs {_mib(needed)} of shared memory, and {DIRECTORY} has {_mib(free)} free of {_mib(size)}; "
            "enlarge it (a container's is 64 MiB by default: docker run --shm-size=64g), or sync by 'disk'"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
