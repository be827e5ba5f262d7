"""Checkpoint directories that appear, whole and verified, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.local import (
    LocalPlace,
    Workspace,
    check_visible,
    shared_workspace,
    workspace_of_each_machine,
)
from core_rl.checkpoint.manifest import (
    HASHING_THREADS,
    MANIFEST,
    FileRecord,
    Manifest,
    all_files,
    file_names,
    find_damage,
    read_manifest,
    records_of,
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

__all__ = ["Publication", "begin_publish", "opened", "publish", "stage"]


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
    directory replaces the checkpoint at ``path``, which all ranks must see, or which is an fsspec URL. For a URL
    each machine has a directory for temporary files of its own, from which its ranks upload.

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
        staged = stage(path, state or {}, world, stack, subject)
        on_all(world, lambda: write(staged.path), subject, CheckpointError)
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
    staged: Workspace
    """The directory."""
    kind: str
    state: Mapping[str, Any]
    world: Comm
    subject: str
    resources: ExitStack

    def commit(self) -> None:
        """Add the manifest, and put the directory in place; collective. Raises as `publish` does."""
        with self.resources:
            names = self._own_names()
            shares = agree(self.world, lambda: self._records(names), self.subject, CheckpointError)
            records = {name: record for share in shares for name, record in share.items()}
            manifest = Manifest.of(self.kind, self.state, records)
            if is_url(self.path):
                self._upload(names, manifest)
            else:
                place = LocalPlace(self.path)
                staged = self.staged.path
                on_leader(self.world, lambda: place.commit(staged, manifest), self.subject, CheckpointError)

    def close(self) -> None:
        """Remove the directory; after `commit`, nothing."""
        self.resources.close()

    def _own_names(self) -> Sequence[str]:
        """The files that this rank hashes and uploads."""
        staged = self.staged
        found = agree(
            self.world, lambda: file_names(staged.path) if staged.leads else [], self.subject, CheckpointError
        )
        return staged.share(found[staged.ranks[0]])

    def _records(self, names: Sequence[str]) -> dict[str, FileRecord]:
        return records_of(self.staged.path, names, _threads(self.staged))

    def _upload(self, names: Sequence[str], manifest: Manifest) -> None:
        """Upload this rank's files, and when all ranks have, the manifest; collective."""
        place = RemotePlace(self.path)
        on_leader(self.world, place.begin, self.subject, CheckpointError)
        on_all(self.world, lambda: place.upload(self.staged.path, names), self.subject, CheckpointError)
        on_leader(self.world, lambda: place.commit(manifest), self.subject, CheckpointError)


def stage(path: str, state: Mapping[str, Any], world: Comm, stack: ExitStack, subject: str) -> Workspace:
    """An empty directory for the checkpoint at ``path``; collective.

    It lives as long as the ``stack`` of rank 0, and for a URL of each machine's leader.
    """

    def check() -> Path | None:
        to_json(state, "the state of the checkpoint")
        if is_url(path):
            RemotePlace(path).check_replaceable()
            return None
        return stack.enter_context(LocalPlace(path).staging())

    staged = on_leader(world, check, subject, CheckpointError)
    if staged is None:
        return workspace_of_each_machine(world, stack, subject)
    on_all(world, lambda: check_visible(staged), subject, CheckpointError)
    return shared_workspace(staged, world)


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

    A URL is downloaded first, into a temporary directory on each machine. Every rank raises the same error:
    `CheckpointNotFound` if there is nothing, `CheckpointDamaged` with every file that is missing,
    truncated or changed, `CheckpointMismatch` if it is not of ``kind``. With
    ``require_manifest=False``, a directory that something else wrote is accepted as it is. With ``parts_later``,
    files in subdirectories that have a manifest of their own are there in full size, and who opens them hashes them.
    With ``digests=False`` that is so for all files.
    """
    subject = f"cannot load {path!r}"
    with ExitStack() as stack:
        copy = _local_copy(path, world, stack, subject)
        directory = copy.path

        def recorded() -> tuple[dict[str, FileRecord], set[str]]:
            files = _recorded(directory, kind, require_manifest)
            now = set(read_manifest(directory).files) if parts_later else set(files)
            return files, set(files) - now if digests else set(files)

        files, later = on_leader(world, recorded, subject)
        on_all(world, lambda: check_visible(directory), subject)
        own = {name: files[name] for name in copy.share(list(files))}
        shares = agree(world, lambda: find_damage(directory, own, later, _threads(copy)), subject)
        problems = {name: problem for share in shares for name, problem in share.items()}
        raise_all(
            CheckpointDamaged,
            f"{subject}: the checkpoint is damaged",
            [problems[name] for name in files if name in problems],
        )
        yield directory
        if is_url(path):
            world.barrier()  # the leader of each machine removes the download when it leaves


def _local_copy(path: str, world: Comm, stack: ExitStack, subject: str) -> Workspace:
    """The directory at ``path``, or on each machine a copy of what is at the URL; collective."""
    if not is_url(path):
        return shared_workspace(on_leader(world, lambda: LocalPlace(path).current(), subject), world)
    root, names = on_leader(world, lambda: RemotePlace(path).files(), subject)
    copy = workspace_of_each_machine(world, stack, subject)
    on_all(world, lambda: RemotePlace(path).download(root, copy.share(names), copy.path), subject)
    return copy


def _threads(workspace: Workspace) -> int:
    return max(1, HASHING_THREADS // len(workspace.ranks))


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
