"""Orders and reports between the driver and an agent, as JSON, in both directions at once, with signs of life."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from core_rl.distributed.channel import FRAME_HEADER, MessageTooLarge
from core_rl_cluster import hello

__all__ = ["CONTROL_LIMIT_BYTES", "ControlChannel"]

CONTROL_LIMIT_BYTES = 2**24
"""The largest message: stacks of all threads fit, and no unknown peer can take the driver's memory."""
BEAT: Mapping[str, Any] = {"is": "beat"}
"""A sign of life."""
BEATS = 5
"""In the time of one lease, so that a late one ends nothing."""


class ControlChannel:
    """Messages of any thread, also of a signal's handler, to the other side; one thread receives.

    A side that is silent for ``lease_s`` seconds is gone; each shows signs of life by itself.
    """

    def __init__(self, sock: socket.socket, lease_s: float) -> None:
        # One limit for both directions: they share the socket's.
        sock.settimeout(lease_s)
        self._socket = sock
        self._lease_s = lease_s
        self._outgoing: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="core-rl control", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send ``message`` soon. What breaks shows itself to the thread that reads."""
        self._outgoing.put(message)

    def receive(self) -> dict[str, Any]:
        """The next message; raises ``OSError``, ``EOFError`` at the end, and `ClusterError` for an invalid message."""
        while True:
            (size,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size))
            if size > CONTROL_LIMIT_BYTES:
                raise MessageTooLarge(f"a message of {size} bytes; the limit is {CONTROL_LIMIT_BYTES}")
            message = hello.parsed(self._read(size))
            if message != BEAT:
                return message

    def close(self) -> None:
        """End the connection; a thread that reads gets ``EOFError`` or ``OSError``."""
        self._outgoing.put(None)
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        with suppress(OSError):
            while True:
                try:
                    message = self._outgoing.get(timeout=self._lease_s / BEATS)
                except queue.Empty:
                    message = BEAT
                if message is None:
                    break
                data = json.dumps(message).encode()
                self._socket.sendall(FRAME_HEADER.pack(len(data)) + data)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the other end closed the connection")
            view = view[count:]
        return data
