"""Nodes of a Ray cluster that Ray takes for alive, and that do not respond.

Ray notices a lost machine after some 20 s. A placement group that is asked for in between may be sent to it, and
Ray then serves no other group for minutes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["silent_nodes"]

CONNECT_S = 2.0
"""Time limit for a connection to the raylet of a node."""
AT_ONCE = 64
"""Nodes that are asked at one time."""


def silent_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The addresses of those of ``ray.nodes()`` that are alive for Ray, and whose raylet takes no connection."""
    alive = [
        (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in nodes if node["Alive"]
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sorted(
            host for (host, _), answers in zip(alive, pool.map(_answers, alive), strict=True) if not answers
        )


def _answers(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
