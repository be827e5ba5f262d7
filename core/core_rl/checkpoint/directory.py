"""Checkpoint directories that appear, whole and verified, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.local import LocalPlace
from core_rl.checkpoint.manifest import (
    HASHING_THREADS,
    MANIFEST,
    FileRecord,
    all_files,
    file_names,
    find_damage,
    read_manifest,
    records_of,
    seal,
    to_json,
)
from core_rl.checkpoint.remote import RemotePlace, is_url
from core_rl.distributed.agreement import agree, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    raise_all,
)

__all__ = ["Publication", "begin_publish", "opened", "place_of", "publish", "staged_on_leader"]


def publish(
    path: str,
    write: Callable[[Path], None],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Make what ``write(directory)`` writes the checkpoint at ``path``; collective.

    Every rank calls ``write`` with the same empty temporary directory and writes files of its own.
    When all are done, rank 0 adds the manifest with ``kind`` and its ``state`` (JSON), and the
    directory replaces the checkpoint at ``path``, a local path or an fsspec URL. All ranks must see
    one file system (for URLs: the directory of temporary files).

    When anything fails on any rank, all ranks raise one `CheckpointError` that names the rank and
    the file, and a checkpoint that was at ``path`` stays. If a rank dies, it stays as well.
    A ``write`` that runs collectives must not leave them halfway on one rank.
    """
    begin_publish(path, write, world, kind=kind, state=state).commit()


def begin_publish(
    path: str,
    write: Callable[[Path], None],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any] | None = None,
) -> Publication:
    """The first half of `publish`: what ``write`` writes is there, and not yet at ``path``; collective."""
    subject = f"cannot save {path!r}, and what was there before is untouched"
    with ExitStack() as stack:
        staged = staged_on_leader(path, state or {}, world, stack, subject)
        on_all(world, lambda: write(staged), subject, CheckpointError)
        return Publication(
            path=path,
            staged=staged,
            kind=kind,
            state=state or {},
            world=world,
            subject=subject,
            resources=stack.pop_all(),
        )


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A written directory that is to become the checkpoint at ``path``."""

    path: str
    staged: Path
    """The directory."""
    kind: str
    state: Mapping[str, Any]
    world: Comm
    subject: str
    resources: ExitStack

    def commit(self) -> None:
        """Add the manifest, and put the directory in place; collective. Raises as `publish` does."""
        with self.resources:
            names = on_leader(self.world, lambda: file_names(self.staged), self.subject, CheckpointError)
            shares = agree(self.world, lambda: self._records(names), self.subject, CheckpointError)
            records = {name: record for share in shares for name, record in share.items()}
            on_leader(self.world, lambda: self._put_in_place(records), self.subject, CheckpointError)

    def close(self) -> None:
        """Remove the directory; after `commit`, nothing."""
        self.resources.close()

    def _records(self, names: Sequence[str]) -> dict[str, FileRecord]:
        return records_of(self.staged, _share(names, self.world), _threads(self.world))

    def _put_in_place(self, records: Mapping[str, FileRecord]) -> None:
        seal(self.staged, self.kind, self.state, records)
        place_of(self.path).commit(self.staged)


def staged_on_leader(
    path: str, state: Mapping[str, Any], world: Comm, stack: ExitStack, subject: str
) -> Path:
    """A temporary directory that all ranks see, which lives as long as the ``stack`` of rank 0; collective."""

    def stage() -> Path:
        to_json(state, "the state of the checkpoint")
        return stack.enter_context(place_of(path).staging())

    staged = on_leader(world, stage, subject, CheckpointError)
    on_all(world, lambda: _check_visible(staged), subject, CheckpointError)
    return staged


@contextmanager
def opened(
    path: str,
    world: Comm,
    *,
    kind: str | None,
    require_manifest: bool = True,
    parts_later: bool = False,
    digests: bool = True,
) -> Iterator[Path]:
    """A local directory with the verified checkpoint of ``path``, the same on all ranks; collective.

    A URL is downloaded into a temporary directory first. Every rank raises the same error:
    `CheckpointNotFound` if there is nothing, `CheckpointDamaged` with every file that is missing,
    truncated or changed, `CheckpointMismatch` if it is not of ``kind``. With
    ``require_manifest=False``, a directory that something else wrote is accepted as it is. With ``parts_later``,
    files in subdirectories that have a manifest of their own are there in full size, and who opens them hashes them.
    With ``digests=False`` that is so for all files.
    """
    with ExitStack() as stack:

        def fetch() -> tuple[Path, dict[str, FileRecord], set[str]]:
            directory = stack.enter_context(place_of(path).reading())
            files = _recorded(directory, kind, require_manifest)
            now = set(read_manifest(directory).files) if parts_later else set(files)
            return directory, files, set(files) - now if digests else set(files)

        subject = f"cannot load {path!r}"
        directory, files, later = on_leader(world, fetch, subject)
        on_all(world, lambda: _check_visible(directory), subject)
        own = {name: files[name] for name in _share(list(files), world)}
        shares = agree(world, lambda: find_damage(directory, own, later, _threads(world)), subject)
        problems = {name: problem for share in shares for name, problem in share.items()}
        raise_all(
            CheckpointDamaged,
            f"{subject}: the checkpoint is damaged",
            [problems[name] for name in files if name in problems],
        )
        yield directory
        if is_url(path):
            world.barrier()  # rank 0 removes the download when it leaves


def place_of(path: str) -> LocalPlace | RemotePlace:
    """Storage of the checkpoint at ``path``, a local path or an fsspec URL."""
    return RemotePlace(path) if is_url(path) else LocalPlace(path)


def _check_visible(directory: Path) -> None:
    """Raise `CheckpointError` on a rank that does not see what rank 0 made."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} does not exist here; all ranks must see one file system. For a URL, set the environment "
            "variable TMPDIR to a directory that they share"
        )


def _share(names: Sequence[str], world: Comm) -> Sequence[str]:
    """Those of ``names`` that this rank hashes; of files with the number of a rank, its own."""
    return names[world.rank :: world.size]


def _threads(world: Comm) -> int:
    return max(1, HASHING_THREADS // world.size)


def _recorded(directory: Path, kind: str | None, require_manifest: bool) -> dict[str, FileRecord]:
    """The files of a checkpoint as they should be, by its manifest; none where there is no manifest."""
    if not directory.is_dir() or not any(directory.iterdir()):
        raise CheckpointNotFound("there is no checkpoint at this place")
    if not require_manifest and not (directory / MANIFEST).is_file():
        return {}
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise CheckpointMismatch(f"it is a checkpoint of kind {manifest.kind!r}, not {kind!r}")
    return all_files(directory, manifest)
