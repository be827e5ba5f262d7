"""Addresses of machines, and connections between them that notice when the other end is gone."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress

from core_rl.distributed.channel import set_lease
from core_rl.errors import ConfigError

__all__ = ["connect", "interface_of", "own_address", "parse_endpoint", "socket_address"]

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
IPV4_OFFSET = 20
"""Offset of the address in the kernel's answer."""
SOMEWHERE = ("192.0.2.1", 9)
"""An address outside (RFC 5737): connecting a datagram socket sends nothing, and shows which interface leads there."""


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
