"""A checkpoint under an fsspec URL, where nothing can be renamed.

The manifest is uploaded last and is the commit marker: without it there is no checkpoint. To
replace one, its files are first copied to ``.previous/`` next to the manifest, which readers use while
the manifest itself is missing. ``.incomplete`` marks a place that an unfinished save has touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from core_rl.checkpoint.manifest import MANIFEST, Manifest, check_ours, parse_manifest
from core_rl.errors import CheckpointError, MissingPackage

__all__ = ["RemoteStorage", "is_url"]

PREVIOUS = ".previous"
INCOMPLETE = ".incomplete"


def is_url(path: str) -> bool:
    """Whether ``path`` is an fsspec URL and not a local path."""
    return "://" in path


class RemoteStorage:
    """A directory of a remote store as a place for a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:  # which names the package of the protocol
            raise MissingPackage(f"cannot open {url!r}: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"cannot open {url!r}: {error}") from error
        self.root: str = root.rstrip("/")
        """The place in the store, as `download` takes it."""
        self._fs.invalidate_cache()

    def check_replaceable(self) -> None:
        """Raise `CheckpointError` if something that is not a checkpoint is at the place."""
        occupied = self._fs.exists(self.root) and self._fs.find(self.root)
        if occupied and not self._fs.exists(self._at(INCOMPLETE)):
            check_ours(self.manifest_bytes(), self.url)

    def begin(self) -> None:
        """Set the checkpoint that is there aside, where readers find it until `commit`; before the first `upload`."""
        self._set_previous_aside()
        self._fs.makedirs(self.root, exist_ok=True)
        self._fs.pipe_file(self._at(INCOMPLETE), b"")

    def upload(self, directory: Path, names: Iterable[str]) -> None:
        """Upload the files ``names`` of ``directory``; any process may."""
        for name in names:
            self._fs.makedirs(str(PurePosixPath(self._at(name)).parent), exist_ok=True)
            self._fs.put_file(str(directory / name), self._at(name))

    def commit(self, manifest: Manifest) -> None:
        """Upload the manifest of the files that are there, and remove all others."""
        self._fs.pipe_file(self._at(MANIFEST), manifest.to_bytes())
        self._remove(self._at(PREVIOUS), recursive=True)
        for leftover in sorted(self._everything(self.root) - self._files(self.root)):
            self._remove(self._at(leftover))

    def files(self) -> tuple[str, list[str]]:
        """The directory of the checkpoint in the store, and its files, nested ones included, in order."""
        root = self._current()
        return root, sorted(self._files(root) or self._everything(root))

    def download(self, root: str, names: Iterable[str], directory: Path) -> None:
        """Copy the files ``names`` of `files` to ``directory``."""
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the verification that follows names missing files
                self._fs.get_file(f"{root}/{name}", str(directory / name))

    def manifest_bytes(self) -> bytes | None:
        """The manifest's text, or None where there is none."""
        file = f"{self._current()}/{MANIFEST}"
        return bytes(self._fs.cat_file(file)) if self._fs.exists(file) else None

    def names(self) -> list[str]:
        """The entries at the place itself, without those inside of directories."""
        self._fs.invalidate_cache()  # other processes write here
        entries = self._fs.ls(self.root, detail=False) if self._fs.exists(self.root) else []
        return [PurePosixPath(entry).name for entry in entries]

    def remove(self) -> None:
        """Remove the checkpoint; dying halfway leaves files without a manifest."""
        for name in (f"{PREVIOUS}/{MANIFEST}", MANIFEST):
            self._remove(self._at(name))
        self._remove(self.root, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _current(self) -> str:
        set_aside = not self._fs.exists(self._at(MANIFEST)) and self._fs.exists(
            self._at(f"{PREVIOUS}/{MANIFEST}")
        )
        return self._at(PREVIOUS) if set_aside else self.root

    def _set_previous_aside(self) -> None:
        """Copy a complete checkpoint to ``.previous/`` and remove its manifest."""
        if not self._fs.exists(self._at(MANIFEST)):
            return
        self._remove(self._at(PREVIOUS), recursive=True)
        files = self._files(self.root)
        for name in [*sorted(files - {MANIFEST}), MANIFEST]:
            target = self._at(f"{PREVIOUS}/{name}")
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            with suppress(FileNotFoundError):  # a damaged checkpoint may be replaced too
                self._fs.cp_file(self._at(name), target)
        self._remove(self._at(MANIFEST))

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
        paths = self._fs.find(root) if self._fs.exists(root) else []
        return {str(PurePosixPath(file).relative_to(root)) for file in paths}

    def _remove(self, target: str, recursive: bool = False) -> None:
        if self._fs.exists(target):
            self._fs.rm(target, recursive=recursive)
