"""Copies of run checkpoints under an fsspec URL, where nothing can be renamed: the manifest is uploaded last.

Without its manifest a copy does not count. A step that is copied again loses it first.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from core_rl.checkpoint.directory import LocalStorage, is_url
from core_rl.checkpoint.manifest import MANIFEST, all_files, find_damage, read_manifest
from core_rl.checkpoint.run import STEP, RunCheckpoints, name_of
from core_rl.distributed.agreement import on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, ConfigError, MissingPackage, raise_all


class CheckpointCopies:
    """The newest ``keep`` run checkpoints under ``url``, for one driver alone: ``step-00000010/…``.

    All methods raise `CheckpointError` with the URL and the reason of the store. Raises `ConfigError` for a path
    without a protocol, and `MissingPackage`.
    """

    def __init__(self, url: str, keep: int) -> None:
        if not is_url(url):
            raise ConfigError(f"{url!r} is not an fsspec URL, such as s3://bucket/run")
        self.url = url.rstrip("/")
        self.keep = keep
        _Storage(self.url)

    def steps(self) -> list[int]:
        """The steps with a complete copy, in order."""
        return on_leader(Comm(), self._complete, f"cannot list {self.url!r}", CheckpointError)

    def upload(self, step: int, directory: Path) -> None:
        """Copy the complete checkpoint in ``directory``, and then remove old and incomplete copies."""

        def copy() -> None:
            text = (directory / MANIFEST).read_bytes()
            place = self._place(step)
            if place.manifest_bytes() != text:
                place.remove()
                place.upload(
                    directory, sorted(set(all_files(directory, read_manifest(directory))) - {MANIFEST})
                )
                place.upload(directory, [MANIFEST])
            retained = self._complete()[-self.keep :]
            for old_step in self._all():
                if old_step not in retained and old_step < step:
                    self._place(old_step).remove()

        subject = f"cannot copy the checkpoint of step {step} to {self.url!r}; it is in {directory}"
        on_leader(Comm(), copy, subject, CheckpointError)

    def download(self, checkpoints: RunCheckpoints) -> None:
        """Add the newest copy to ``checkpoints``, unless they have it or a later one.

        Raises `CheckpointDamaged` with the changed files.
        """
        steps, local_steps = self.steps(), checkpoints.steps()
        if steps and (not local_steps or local_steps[-1] < steps[-1]):
            step = steps[-1]
            subject = f"cannot read the checkpoint of step {step} in {self.url!r}"
            on_leader(Comm(), lambda: self._fetch(step, checkpoints.root), subject)

    def clear(self) -> None:
        def remove() -> None:
            for step in self._all():
                self._place(step).remove()

        on_leader(Comm(), remove, f"cannot remove the checkpoints in {self.url!r}", CheckpointError)

    def _fetch(self, step: int, root: Path) -> None:
        target = LocalStorage(str(root / name_of(step)))
        with target.staging() as staged:
            self._place(step).download(staged)
            manifest = read_manifest(staged)
            damage = find_damage(staged, all_files(staged, manifest))
            raise_all(CheckpointDamaged, "the copy is damaged", list(damage.values()))
            target.commit(staged, manifest)

    def _place(self, step: int) -> _Storage:
        return _Storage(f"{self.url}/{name_of(step)}")

    def _all(self) -> list[int]:
        names = _Storage(self.url).names()
        return sorted(int(match[1]) for name in names if (match := STEP.match(name)))

    def _complete(self) -> list[int]:
        return [step for step in self._all() if self._place(step).manifest_bytes() is not None]


class _Storage:
    """A directory of a store."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:  # which names the package of the protocol
            raise MissingPackage(f"cannot open {url!r}: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"cannot open {url!r}: {error}") from error
        self._root: str = root.rstrip("/")
        self._fs.invalidate_cache()

    def names(self) -> list[str]:
        """The entries of the directory, without those inside of directories."""
        entries = self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else []
        return [PurePosixPath(entry).name for entry in entries]

    def manifest_bytes(self) -> bytes | None:
        """The manifest's text, or None where there is none."""
        file = f"{self._root}/{MANIFEST}"
        return bytes(self._fs.cat_file(file)) if self._fs.exists(file) else None

    def upload(self, directory: Path, names: list[str]) -> None:
        for name in names:
            target = f"{self._root}/{name}"
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            self._fs.put_file(str(directory / name), target)

    def download(self, directory: Path) -> None:
        for file in self._fs.find(self._root):
            target = directory / PurePosixPath(file).relative_to(self._root)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the verification that follows names missing files
                self._fs.get_file(file, str(target))

    def remove(self) -> None:
        """Remove the directory; dying halfway leaves files without a manifest."""
        for target in (f"{self._root}/{MANIFEST}", self._root):
            if self._fs.exists(target):
                self._fs.rm(target, recursive=target == self._root)
