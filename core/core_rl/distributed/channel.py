"""Framed messages between two processes over a socket."""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["Channel"]

HEADER = struct.Struct("!Q")


class Channel:
    """Framed messages over one end of a socket pair; no operation outlasts its deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor, so that `multiprocessing.connection.wait` takes a channel."""
        return self._socket.fileno()

    def send(self, payload: bytes, deadline: float | None = None) -> None:
        """Send one message before ``deadline`` (of `time.monotonic`), or raise `TimeoutError` or `OSError`."""
        self._limit(deadline)
        self._socket.sendall(HEADER.pack(len(payload)))
        self._limit(deadline)
        self._socket.sendall(payload)

    def receive(self, deadline: float | None = None) -> bytearray:
        """The next message; raises `TimeoutError` at ``deadline`` and `EOFError` when the other end is closed."""
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return self._read(size, deadline)

    def close(self) -> None:
        """Close this end; the other one reads the end of the stream."""
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._limit(deadline)
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the other end closed the connection")
            view = view[count:]
        return data

    def _limit(self, deadline: float | None) -> None:
        # A timeout of 0 would mean "do not block" and raise another error than TimeoutError.
        self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
