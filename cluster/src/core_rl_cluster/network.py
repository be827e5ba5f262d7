"""Addresses, connections and control channels between machines, which notice when the other end is gone."""

from __future__ import annotations

import ipaddress
import json
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from core_rl.distributed.channel import FRAME_HEADER, MessageTooLarge, set_lease
from core_rl.errors import ConfigError
from core_rl_cluster import hello

__all__ = [
    "CONTROL_LIMIT_BYTES",
    "ControlChannel",
    "connect",
    "interface_of",
    "own_address",
    "parse_endpoint",
    "socket_address",
]

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
IPV4_OFFSET = 20
"""Offset of the address in the kernel's answer."""
SOMEWHERE = ("192.0.2.1", 9)
"""An address outside (RFC 5737): connecting a datagram socket sends nothing, and shows which interface leads there."""
CONTROL_LIMIT_BYTES = 2**24
"""The largest message: stacks of all threads fit, and no unknown peer can take the driver's memory."""
BEAT: Mapping[str, Any] = {"is": "beat"}
"""A sign of life."""
BEATS = 5
"""In the time of one lease, so that a late one ends nothing."""


def connect(host: str, port: int, timeout_s: float, lease_s: float) -> socket.socket:
    """A connection to ``host``; raises ``OSError``."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    if sock.getsockname() == sock.getpeername():
        sock.close()
        # The kernel gave this end the very port without a listener, and TCP takes that for a connection.
        raise ConnectionRefusedError(f"no listener on port {port}")
    set_lease(sock, lease_s)
    return sock


def socket_address(sock: socket.socket) -> str:
    """The address of this end."""
    address: str = sock.getsockname()[0]
    return address


def own_address(field: str) -> str:
    """The address of this machine towards others; raises `ConfigError` where that is not known.

    ``field`` is the name of its setting.
    """
    name = socket.gethostname()
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(SOMEWHERE)
        return socket_address(probe)
    meaning = f"means {address}, which other machines cannot reach" if address else "has no address"
    raise ConfigError(
        f"the address of this machine is not known: its host name {name!r} {meaning}, and it has no default route; set "
        f"{field} to the address that the machines shall connect to"
    )


def interface_of(address: str) -> str | None:
    """The network interface that has the IPv4 ``address``; None where it is not found."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(query.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[IPV4_OFFSET : IPV4_OFFSET + 4]) == address:
                    return name
    return None


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{text!r} is no address; write HOST:PORT, as the driver shows it")
    return host.strip("[]"), int(port)


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
