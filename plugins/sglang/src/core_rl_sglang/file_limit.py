"""The limit of open files, of which each request in flight needs one."""

from __future__ import annotations

import errno
import resource
from contextlib import suppress

from core_rl.errors import RolloutError

__all__ = ["TooManyFiles", "is_exhausted", "requests_at_one_time"]

SPARE_FILES = 256
"""Files that are left to everything else: weights, logs, sockets of ranks, calls that control servers."""


class TooManyFiles(RolloutError):
    """This process may open no more files; nothing is wrong with the server."""


def requests_at_one_time() -> int:
    """Requests that may be in flight, after this process's soft limit was raised to its hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # no limit at all is more than some systems allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - min(SPARE_FILES, soft // 2))


def is_exhausted(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is that no more files can be opened."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__
    return False
