"""A checkpoint under an fsspec URL, where nothing can be renamed.

The manifest is uploaded last and is the commit marker: without it there is no checkpoint. To
replace one, its files are first copied to ``.previous/`` next to the manifest, which readers use while
the manifest itself is missing. ``.incomplete`` marks a place that an unfinished save has touched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from core_rl.checkpoint.manifest import MANIFEST, check_ours, parse_manifest
from core_rl.errors import CheckpointError

__all__ = ["RemotePlace", "is_url"]

PREVIOUS = ".previous"
INCOMPLETE = ".incomplete"


def is_url(path: str) -> bool:
    """Whether ``path`` is an fsspec URL and not a local path."""
    return "://" in path


class RemotePlace:
    """A directory of a remote store as a place for a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot open {url!r}: {error}") from error
        self._root: str = root.rstrip("/")
        self._fs.invalidate_cache()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A local directory to write into, which `commit` uploads.

        Raises `CheckpointError` if something that is not a checkpoint is at the place.
        """
        self._check_replaceable()
        with tempfile.TemporaryDirectory(prefix="core-rl-save-") as directory:
            yield Path(directory)

    def commit(self, staged: Path) -> None:
        """Upload the complete directory ``staged``."""
        before = self._set_previous_aside()
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._at(INCOMPLETE), b"")
        files = {file.relative_to(staged).as_posix() for file in staged.rglob("*") if file.is_file()}
        for name in [*sorted(files - {MANIFEST}), MANIFEST]:
            self._fs.makedirs(str(PurePosixPath(self._at(name)).parent), exist_ok=True)
            self._fs.put_file(str(staged / name), self._at(name))
        for leftover in before - files | {INCOMPLETE}:
            self._remove(self._at(leftover))
        self._remove(self._at(PREVIOUS), recursive=True)

    @contextmanager
    def reading(self) -> Iterator[Path]:
        """A local copy of the checkpoint; empty if there is nothing."""
        with tempfile.TemporaryDirectory(prefix="core-rl-load-") as name:
            directory = Path(name)
            root = self._current()
            for file in self._files(root) or self._everything(root):
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # the verification that follows names what is missing
                    self._fs.get_file(f"{root}/{file}", str(directory / file))
            yield directory

    def manifest_bytes(self) -> bytes | None:
        """The manifest's text, or None where there is none."""
        file = f"{self._current()}/{MANIFEST}"
        return bytes(self._fs.cat_file(file)) if self._fs.exists(file) else None

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _current(self) -> str:
        set_aside = not self._fs.exists(self._at(MANIFEST)) and self._fs.exists(
            self._at(f"{PREVIOUS}/{MANIFEST}")
        )
        return self._at(PREVIOUS) if set_aside else self._root

    def _check_replaceable(self) -> None:
        occupied = self._fs.exists(self._root) and self._fs.find(self._root)
        if occupied and not self._fs.exists(self._at(INCOMPLETE)):
            check_ours(self.manifest_bytes(), self.url)

    def _set_previous_aside(self) -> set[str]:
        """Copy what is complete to ``.previous/`` and take its manifest away; returns its files."""
        if not self._fs.exists(self._at(MANIFEST)):
            return set()
        self._remove(self._at(PREVIOUS), recursive=True)
        files = self._files(self._root)
        for name in [*sorted(files - {MANIFEST}), MANIFEST]:
            target = self._at(f"{PREVIOUS}/{name}")
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            with suppress(FileNotFoundError):  # a damaged checkpoint may be replaced too
                self._fs.cp_file(self._at(name), target)
        self._remove(self._at(MANIFEST))
        return files

    def _files(self, root: str, folder: str = "") -> set[str]:
        """All files of a complete checkpoint, nested ones included, relative to ``root``."""
        place = str(PurePosixPath(root, folder, MANIFEST))
        if not self._fs.exists(place):
            return set()
        manifest = parse_manifest(bytes(self._fs.cat_file(place)), self.url)
        names = {str(PurePosixPath(folder, name)) for name in [MANIFEST, *manifest.files]}
        return names.union(
            *(self._files(root, str(PurePosixPath(folder, inner))) for inner in manifest.nested())
        )

    def _everything(self, root: str) -> set[str]:
        found = self._fs.find(root) if self._fs.exists(root) else []
        return {str(PurePosixPath(file).relative_to(root)) for file in found}

    def _remove(self, target: str, recursive: bool = False) -> None:
        if self._fs.exists(target):
            self._fs.rm(target, recursive=recursive)
