"""Buckets between two machines: their bytes follow the message, and the receiver puts them into its shared memory."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import torch

from core_rl.distributed.channel import LIMIT_BYTES, Channel
from core_rl.weight_sync.buckets import flat_bytes, shared_bytes, start_of
from core_rl.weight_sync.messages import REPLY_TIMEOUT_S, Bucket
from core_rl.weight_sync.shared_memory import require_shared_memory

__all__ = ["RemoteBucket", "RemoteChannel"]


class RemoteChannel(Channel):
    """A channel to another machine, which shares no memory with this one."""

    def __init__(self, sock: socket.socket, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(sock, limit_bytes)
        self.own_address: str = sock.getsockname()[0]
        """The address of this machine towards the other one."""


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
            (name, flat[start : start + _nbytes(dtype, shape)].view(dtype).view(shape))
            for name, dtype, shape, start in self.tensors
        ]


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()
