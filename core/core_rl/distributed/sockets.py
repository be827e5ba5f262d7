"""Directories of named sockets, whose names the kernel limits to 107 bytes, however long ``TMPDIR`` is."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from core_rl.errors import ConfigError

LONGEST = 60
"""Bytes of a directory below which `multiprocessing`, torch and servers have room for the rest of a name."""
SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  (files are made with names that nobody can foresee)
_environment = threading.RLock()


def socket_directory() -> str:
    """The directory of temporary files, or a short one where that is too long.

    Raises `ConfigError` where no short one can be written.
    """
    usual = tempfile.gettempdir()
    for directory in (usual, *SHORT):
        if len(os.fsencode(directory)) <= LONGEST and os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise ConfigError(
        f"TMPDIR = {usual!r} is longer than the {LONGEST} bytes with which names of sockets fit, and neither "
        f"{' nor '.join(SHORT)} can be written; set TMPDIR to a shorter directory"
    )


@contextmanager
def short_socket_names() -> Iterator[None]:
    """Libraries that make a named socket inside find a `socket_directory` in ``TMPDIR``.

    The environment belongs to the whole process: one thread at a time.
    """
    with _environment:
        usual, directory = tempfile.gettempdir(), socket_directory()
    if directory == usual:
        yield
        return
    with _environment:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        try:
            yield
        finally:
            os.environ["TMPDIR"] = tempfile.tempdir = usual
