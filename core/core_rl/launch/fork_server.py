"""The first import of the fork server: what ranks inherit, and an end at once with the process that started it."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import select
import signal
import sys
from contextlib import suppress

COMMAND = re.compile(r"main\(\d+, (?P<alive>\d+),")
"""How `multiprocessing` calls the fork server, with the read end of a pipe whose write end only the parent holds."""


def _end_with_parent(alive: int) -> None:
    """Have the kernel kill this process when its parent ends.

    By itself it looks only after the imports, and then takes down an interpreter with many modules: seconds each.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # the parent was faster
        os._exit(0)


if hasattr(fcntl, "F_SETSIG") and (found := COMMAND.search(sys.orig_argv[-1])):
    with suppress(OSError):  # sandboxes may refuse it
        _end_with_parent(int(found["alive"]))
importlib.import_module("core_rl.launch.preload")
