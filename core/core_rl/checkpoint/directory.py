"""Checkpoint directories, written as a whole or not at all, and verified when they are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.local import (
    LocalStorage,
    Workspace,
    check_visible,
    machine_workspace,
    shared_workspace,
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
from core_rl.checkpoint.remote import RemoteStorage, is_url
from core_rl.distributed.agreement import agree, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    raise_all,
)

__all__ = ["open_checkpoint", "open_update", "stage", "write_checkpoint"]


def write_checkpoint(
    path: str,
    write: Callable[[Path], None],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Replace the checkpoint at ``path`` with the files of ``write(directory)``; collective.

    All ranks write different files into one empty directory, at an fsspec URL into one on each machine. The manifest
    has ``kind`` and ``state`` (JSON). A local ``path`` is on a file system of all ranks.

    When anything fails on any rank, all ranks raise one `CheckpointError` with the rank and the file, and the
    previous checkpoint stays, as it does when a rank dies. ``write`` takes part in its collectives to the end.
    """
    subject = f"cannot save {path!r}, and what was there before is untouched"
    state = state or {}
    with ExitStack() as stack:
        staged = stage(path, state, world, stack, subject)
        on_all(world, lambda: write(staged.path), subject, CheckpointError)
        listings = agree(
            world, lambda: file_names(staged.path) if staged.leads else [], subject, CheckpointError
        )
        names = staged.share(listings[staged.ranks[0]])
        shares = agree(
            world, lambda: records_of(staged.path, names, _threads(staged)), subject, CheckpointError
        )
        records = {name: record for share in shares for name, record in share.items()}
        manifest = Manifest.of(kind, state, records)
        if is_url(path):
            remote = RemoteStorage(path)
            on_leader(world, remote.begin, subject, CheckpointError)
            on_all(world, lambda: remote.upload(staged.path, names), subject, CheckpointError)
            on_leader(world, lambda: remote.commit(manifest), subject, CheckpointError)
        else:
            local = LocalStorage(path)
            on_leader(world, lambda: local.commit(staged.path, manifest), subject, CheckpointError)


def stage(path: str, state: Mapping[str, Any], world: Comm, stack: ExitStack, subject: str) -> Workspace:
    """Empty directory for the checkpoint at ``path``, for a URL on each machine; its leader's ``stack`` removes it."""

    def check() -> Path | None:
        to_json(state, "the state of the checkpoint")
        if is_url(path):
            RemoteStorage(path).check_replaceable()
            return None
        return stack.enter_context(LocalStorage(path).staging())

    staged = on_leader(world, check, subject, CheckpointError)
    if staged is None:
        return machine_workspace(world, stack, subject)
    on_all(world, lambda: check_visible(staged), subject, CheckpointError)
    return shared_workspace(staged, world)


@contextmanager
def open_checkpoint(
    path: str,
    world: Comm,
    *,
    kind: str | None,
    require_manifest: bool = True,
    nested_digests: bool = True,
    digests: bool = True,
) -> Iterator[Path]:
    """Local directory with the verified checkpoint of ``path``, the same on all ranks; collective.

    A URL is downloaded first, into a temporary directory on each machine. All ranks raise the same error:
    `CheckpointNotFound` for an empty path, `CheckpointDamaged` with every missing, truncated or changed file, and
    `CheckpointMismatch` for another ``kind``. Without ``require_manifest``, a directory without a manifest is accepted
    as it is. Without ``nested_digests``, files below nested manifests are checked by their size alone; without
    ``digests``, all files.
    """
    subject = f"cannot load {path!r}"
    with ExitStack() as stack:
        copy = _local_copy(path, world, stack, subject)
        directory = copy.path

        def recorded() -> tuple[dict[str, FileRecord], set[str]]:
            files = _recorded(directory, kind, require_manifest)
            hashed = set(files) if nested_digests else set(read_manifest(directory).files)
            return files, set(files) - hashed if digests else set(files)

        files, measured = on_leader(world, recorded, subject)
        on_all(world, lambda: check_visible(directory), subject)
        share = {name: files[name] for name in copy.share(list(files))}
        shares = agree(world, lambda: find_damage(directory, share, measured, _threads(copy)), subject)
        problems = {name: problem for share in shares for name, problem in share.items()}
        raise_all(
            CheckpointDamaged,
            f"{subject}: the checkpoint is damaged",
            [problems[name] for name in files if name in problems],
        )
        yield directory
        if is_url(path):
            world.barrier()  # the leader of each machine removes the download when it leaves


def open_update(meta: WeightUpdateMeta) -> AbstractContextManager[Path]:
    """The model directory of an update by ``disk``; see `open_checkpoint`. Digests are compared by ``verify`` alone."""
    verify = meta.verify
    return open_checkpoint(meta.path or "", Comm(), kind="hf", require_manifest=verify, digests=verify)


def _local_copy(path: str, world: Comm, stack: ExitStack, subject: str) -> Workspace:
    """Directory at ``path``, or a download of the URL on each machine; collective."""
    if not is_url(path):
        return shared_workspace(on_leader(world, lambda: LocalStorage(path).current(), subject), world)
    root, names = on_leader(world, lambda: RemoteStorage(path).files(), subject)
    copy = machine_workspace(world, stack, subject)
    on_all(world, lambda: RemoteStorage(path).download(root, copy.share(names), copy.path), subject)
    return copy


def _threads(workspace: Workspace) -> int:
    return max(1, HASHING_THREADS // len(workspace.ranks))


def _recorded(directory: Path, kind: str | None, require_manifest: bool) -> dict[str, FileRecord]:
    """Files of a checkpoint by its manifest; empty without a manifest."""
    if not directory.is_dir() or not any(directory.iterdir()):
        raise CheckpointNotFound("there is no checkpoint at this place")
    if not require_manifest and not (directory / MANIFEST).is_file():
        return {}
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise CheckpointMismatch(f"it is a checkpoint of kind {manifest.kind!r}, not {kind!r}")
    return all_files(directory, manifest)
