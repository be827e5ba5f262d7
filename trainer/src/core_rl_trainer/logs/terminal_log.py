"""The log file of a run: lines of the terminal and warnings of this process, with their times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from core_rl.errors import ConfigError
from core_rl_trainer.logs.progress import TERMINAL

__all__ = ["TerminalLog"]

logger = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class TerminalLog:
    """Collects lines until `open` names a file, and appends them there from then on."""

    def __init__(self) -> None:
        self._handler = MemoryHandler(capacity=1)  # without a target nothing leaves it
        self._handler.setLevel(logging.INFO)

    def open(self, path: Path) -> None:
        """Append to ``path``. Raises `ConfigError` where it cannot be written."""
        try:
            file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        file.setFormatter(logging.Formatter(FORMAT))
        self._handler.setTarget(file)
        self._handler.flush()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside the context, lines and warnings are logged, and an error that ends it."""
        handlers: list[logging.Handler] = [self._handler]
        if not logger.hasHandlers() and logging.lastResort is not None:
            handlers.append(logging.lastResort)  # stderr, which the first handler of the root would replace
        root = logging.getLogger()
        for handler in handlers:
            root.addHandler(handler)
        TERMINAL.addHandler(self._handler)
        try:
            yield
        except BaseException as error:
            TERMINAL.error("%s", f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        finally:
            TERMINAL.removeHandler(self._handler)
            for handler in handlers:
                root.removeHandler(handler)
            self._close()

    def _close(self) -> None:
        file = self._handler.target
        self._handler.close()
        if file is not None:
            file.close()
