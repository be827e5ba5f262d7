"""Connections that notice when the other end is gone, also where nothing tells them."""

from __future__ import annotations

import socket

__all__ = ["set_lease"]

PROBES = 3
"""Unanswered probes of a silent connection until it is given up."""


def set_lease(sock: socket.socket, lease_s: float) -> None:
    """Send without delay, and end the connection when the other machine has been silent for ``lease_s`` seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(lease_s / (PROBES + 1)))
    options = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": int(lease_s * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
