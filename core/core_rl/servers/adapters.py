"""Directories and adapters (LoRA) that servers read, and the adapter that serves a request."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from torch import Tensor

from core_rl.config.engine import LoraConfig

__all__ = ["AdapterForm", "ServedAdapter", "ServedDirectory"]


class AdapterForm(Protocol):
    """The adapters of one kind over one model: the trainer's factors, and the files of servers."""

    @property
    def lora(self) -> LoraConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the trainer's factors, as ``peft`` writes them."""

    def write(self, factors: Mapping[str, Tensor], directory: Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, as servers read them."""


class ServedDirectory:
    """A directory that servers read."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.name = str(directory)
        """Its name, or that of a link to it where servers would take the name for a pattern."""
        self._removed = [directory] if temporary else []
        if glob.escape(self.name) != self.name:
            link = Path(tempfile.mkdtemp(prefix="core-rl-served-")) / "weights"
            link.symlink_to(directory)
            self.name = str(link)
            self._removed.append(link.parent)

    def discard(self) -> None:
        """Remove the link, and a temporary directory; no server will need them again."""
        for directory in self._removed:
            shutil.rmtree(directory, ignore_errors=True)


class ServedAdapter:
    """An adapter over the base weights of servers, or none: ``name`` is None then.

    A request keeps the adapter that it began with. One that has been replaced draws tokens of its own versions as
    long as such requests last, whatever version the server reports by then.
    """

    def __init__(self, version: int, directory: Path | None = None) -> None:
        self.version = version
        self.last_version: int | None = None
        """The last version of its tokens, once it has been replaced."""
        self.in_flight = 0
        """Requests that use it."""
        self._directory = None if directory is None else ServedDirectory(directory, temporary=True)
        self.path = "" if self._directory is None else self._directory.name
        """The directory that servers load it from."""
        self.name = None if directory is None else f"core-rl-{uuid4().hex}"
        """Its name on servers; no two adapters of any engines share one."""

    def version_of(self, weight_version: int) -> int:
        """The version of a token that was drawn when the server reported ``weight_version``."""
        return weight_version if self.last_version is None else min(weight_version, self.last_version)

    def discard(self) -> None:
        """Remove its files; no server will need them again."""
        if self._directory is not None:
            self._directory.discard()
