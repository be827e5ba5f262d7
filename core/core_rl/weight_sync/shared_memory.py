"""Room in the shared memory of this machine, whose use without room ends a process by SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path

from core_rl.errors import WeightsError

__all__ = ["require_shared_memory"]

DIRECTORY = Path("/dev/shm")  # noqa: S108  # where Linux keeps it


def require_shared_memory(needed: int, subject: str) -> None:
    """Raise `WeightsError` where fewer than ``needed`` bytes are free for ``subject``; only Linux has such a limit."""
    if not DIRECTORY.is_dir():
        return
    found = os.statvfs(DIRECTORY)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if free < needed:
        raise WeightsError(
            f"{subject} needs {_mib(needed)} of shared memory, and {DIRECTORY} has {_mib(free)} free of {_mib(size)}; "
            "enlarge it (a container's is 64 MiB by default: docker run --shm-size=64g), or sync by 'disk'"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
