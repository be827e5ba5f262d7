"""The limit of open files, of which each request in flight needs one."""

from __future__ import annotations

import errno

from core_rl.errors import RolloutError
from core_rl.machine import most_open_files

__all__ = ["TooManyFiles", "is_exhausted", "requests_at_one_time"]

SPARE_FILES = 256
"""Files that are left to everything else: weights, logs, sockets of ranks, calls that control servers."""


class TooManyFiles(RolloutError):
    """This process may open no more files; nothing is wrong with the server."""


def requests_at_one_time() -> int:
    """Requests that may be in flight, after this process's soft limit was raised to its hard one."""
    files = most_open_files()
    return max(1, files - min(SPARE_FILES, files // 2))


def is_exhausted(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is that no more files can be opened."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__
    return False
