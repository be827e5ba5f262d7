"""Names of files in the directory of a run, and its lock. Importing this module imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from core_rl.errors import ConfigError

RECIPE = "recipe.yaml"
"""The recipe with all defaults."""
IDENTITY = "identity.json"
"""The rest of what identifies the run."""
STATUS = "status.json"
"""``status``, the ``problem`` that stopped the run, and times."""
METRICS = "metrics.jsonl"
"""An object of metrics for each step."""
RESTARTS = "restarts.jsonl"
"""An object for each restart after ranks or machines were lost (``cluster.restarts``)."""
RESULT = "result.json"
"""The result of a run that has come to its end."""
PAGE = "index.html"
"""The page that shows the run."""
PICTURE = "curve.svg"
"""The rewards, or the losses, over the steps."""
LOG = "run.log"
"""The lines of the terminal and warnings, with times."""
LOCK = ".lock"
"""Locked as long as a process is at work on the run."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of ``directory``, which is made where it is missing.

    Raises `ConfigError` where it cannot be written, and when another process is at work there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    except OSError as error:
        raise ConfigError(_unusable(directory, error.strerror, error.filename)) from error
    with file:
        _take(file, directory)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file ``path``, empty where there is no such file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, which has its earlier content until all of it is written."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def require_free_directory(directory: Path) -> None:
    """Raise as `locked` would, without a lock and without a new file."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(_unusable(directory, "Not a directory", nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(_unusable(directory, "Permission denied", nearest))
    if (directory / LOCK).is_file():
        with (directory / LOCK).open("a") as file:  # NFS locks only files that are open for writing
            _take(file, directory)


def _take(file: TextIO, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
    except BlockingIOError as error:
        raise ConfigError(
            f"output_dir = {str(directory)!r}: another process is at work there; wait for its end, or set "
            "output_dir to another directory"
        ) from error


def _unusable(directory: Path, reason: str | None, path: object) -> str:
    return f"output_dir = {str(directory)!r}: {reason} ({path}); name a directory that can be written"
