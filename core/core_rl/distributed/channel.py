"""Framed messages between two processes. Importing this imports no torch: a driver starts its fork server first."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import TypeAlias

FRAME_HEADER = struct.Struct("!Q")
"""The length of a message, before its bytes."""
Buffer: TypeAlias = bytes | bytearray | memoryview
LIMIT_BYTES = 2**40
"""The largest buffer of a message, unless a channel has another limit: a length above it is no length."""
LIMIT_PARTS = 2**20
"""The most buffers of a message."""
PROBES = 3
"""Unanswered probes of a silent connection until it is given up."""


ALIGNED_BYTES = 2**12
"""Smaller buffers are no tensor's."""
JOINED_BYTES = 2**18
"""Messages up to this size are sent in one piece: a copy costs less than a system call for each buffer."""


class MessageTooLarge(OSError):
    """The other end announced a message above the limit: it is none of ours, or its stream is damaged."""


class Channel:
    """Framed messages over one end of a connection; no operation outlasts its deadline.

    A buffer that is announced with more than ``limit_bytes`` is refused before memory is taken for it.
    """

    def __init__(self, sock: socket.socket, limit_bytes: int = LIMIT_BYTES) -> None:
        self._socket = sock
        self.limit_bytes = limit_bytes

    def fileno(self) -> int:
        """The descriptor, so that `multiprocessing.connection.wait` takes a channel."""
        return self._socket.fileno()

    def send(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        """Send a message of several buffers, large ones without a copy.

        Raises `TimeoutError` at ``deadline`` (of `time.monotonic`), or `OSError`.
        """
        views = [memoryview(part) for part in parts]
        sizes = [view.nbytes for view in views]
        header = struct.pack(f"!{1 + len(sizes)}Q", len(sizes), *sizes)
        if sum(sizes) <= JOINED_BYTES:
            self.send_bytes(b"".join([header, *views]), deadline)
            return
        self.send_bytes(header, deadline)
        for view in views:
            self.send_bytes(view, deadline)

    def receive(self, deadline: float | None = None) -> list[Buffer]:
        """The buffers of the next message, each in memory of its own, aligned as a tensor's.

        Raises `TimeoutError` at ``deadline``, `EOFError` when the other end is closed, and `MessageTooLarge`.
        """
        (count,) = self._sizes(1, deadline, LIMIT_PARTS)
        parts: list[Buffer] = []
        for size in self._sizes(count, deadline, self.limit_bytes):
            memory = _memory(size)
            self.receive_into(memory, deadline)
            parts.append(memory)
        return parts

    def detach(self) -> socket.socket:
        """The socket, for another user; this channel must not be used again."""
        return self._socket

    def close(self) -> None:
        """Close this end; the other one reads the end of the stream."""
        self._socket.close()

    def _sizes(self, count: int, deadline: float | None, limit: int) -> tuple[int, ...]:
        header = bytearray(count * FRAME_HEADER.size)
        self.receive_into(memoryview(header), deadline)
        sizes: tuple[int, ...] = struct.unpack(f"!{count}Q", header)
        if max(sizes, default=0) > limit:
            raise MessageTooLarge(f"a message of {max(sizes)} is announced, above the limit of {limit}")
        return sizes

    def send_bytes(self, data: Buffer, deadline: float | None) -> None:
        """Send ``data`` without its length, which the receiver knows; as `send`."""
        self._limit(deadline)
        self._socket.sendall(data)

    def receive_into(self, view: memoryview, deadline: float | None) -> None:
        """Fill ``view`` with the next bytes; as `receive`."""
        while view:
            self._limit(deadline)
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the other end closed the connection")
            view = view[count:]

    def _limit(self, deadline: float | None) -> None:
        # A timeout of 0 would mean "do not block" and raise another error than TimeoutError.
        self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))


def _memory(size: int) -> memoryview:
    """Memory that is aligned as kernels like it, and not filled with zeros first, where there is enough of it."""
    if size < ALIGNED_BYTES:
        return memoryview(bytearray(size))
    import torch

    return torch.empty(size, dtype=torch.uint8).numpy().data


def set_lease(sock: socket.socket, lease_s: float) -> None:
    """Send without delay, and end the connection when the other machine has been silent for ``lease_s`` seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(lease_s / (PROBES + 1)))
    options = {
        socket.TCP_KEEPIDLE: interval_s,
        socket.TCP_KEEPINTVL: interval_s,
        socket.TCP_KEEPCNT: PROBES,
        socket.TCP_USER_TIMEOUT: int(lease_s * 1000),
    }
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
