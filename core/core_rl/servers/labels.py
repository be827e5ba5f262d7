"""Labels of the weights on a server: which run steers the server, and the version that it gave them.

Products keep one string for the version of their weights, and repeat it with each token. So another run can tell that
a server is in use, and a run that its server was taken over.
"""

from __future__ import annotations

import os
import socket
from uuid import uuid4

__all__ = ["FRESH", "RUN", "UNLABELLED", "label_of", "owner_of", "version_in"]

FRESH = "default"
"""The label of a server that was given no weights since it started."""
UNLABELLED = -1
"""The version of tokens that carry `FRESH`."""
PREFIX = "core-rl:"
RUN = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:4]}"
"""This process, which owns the servers that it labels. Containers may share a host's name and process ids."""


def label_of(version: int) -> str:
    """The label of weights of ``version`` that this process has loaded."""
    return f"{PREFIX}{RUN}:{version}"


def owner_of(label: str) -> str | None:
    """The `RUN` that wrote ``label``; None for a label that no run wrote."""
    return label.removeprefix(PREFIX).rpartition(":")[0] if label.startswith(PREFIX) else None


def version_in(label: str) -> int | None:
    """The version in a label of this process, `UNLABELLED` in `FRESH`; None for the label of others."""
    version = label.rpartition(":")[2]
    if owner_of(label) == RUN and version.isdecimal():
        return int(version)
    return UNLABELLED if label == FRESH else None
