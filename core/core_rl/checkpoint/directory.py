"""Checkpoint directories, written as a whole or not at all, and verified when they are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.local import LocalStorage, check_visible
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
from core_rl.distributed.agreement import gather_or_raise, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    raise_all,
)


def write_checkpoint(
    path: str,
    write: Callable[[Path], None],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Replace the checkpoint at ``path`` with the files of ``write(directory)``; collective.

    All ranks write different files into one empty directory, on a file system of all ranks. The manifest has ``kind``
    and ``state`` (JSON).

    When anything fails on any rank, all ranks raise one `CheckpointError` with the rank and the file, and the
    previous checkpoint stays, as it does when a rank dies. ``write`` takes part in its collectives to the end.
    """
    subject = f"cannot save {path!r}, and what was there before is untouched"
    state = state or {}
    with ExitStack() as stack:
        staged = stage(path, state, world, stack, subject)
        on_all(world, lambda: write(staged), subject, CheckpointError)
        names = on_leader(world, lambda: file_names(staged), subject, CheckpointError)[
            world.rank :: world.size
        ]
        shares = gather_or_raise(
            world, lambda: records_of(staged, names, _threads(world)), subject, CheckpointError
        )
        records = {name: record for share in shares for name, record in share.items()}
        manifest = Manifest.of(kind, state, records)
        on_leader(world, lambda: LocalStorage(path).commit(staged, manifest), subject, CheckpointError)


def stage(path: str, state: Mapping[str, Any], world: Comm, stack: ExitStack, subject: str) -> Path:
    """Empty directory for the checkpoint at ``path``, which the leader's ``stack`` removes; collective."""

    def enter() -> Path:
        to_json(state, "the state of the checkpoint")
        return stack.enter_context(LocalStorage(path).staging())

    staged = on_leader(world, enter, subject, CheckpointError)
    on_all(world, lambda: check_visible(staged), subject, CheckpointError)
    return staged


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
    """The directory of the verified checkpoint at ``path``; collective.

    All ranks raise the same error:
    `CheckpointNotFound` for an empty path, `CheckpointDamaged` with every missing, truncated or changed file, and
    `CheckpointMismatch` for another ``kind``. Without ``require_manifest``, a directory without a manifest is accepted
    as it is. Without ``nested_digests``, files below nested manifests are checked by their size alone; without
    ``digests``, all files.
    """
    subject = f"cannot load {path!r}"
    directory = on_leader(world, lambda: LocalStorage(path).current(), subject)

    def recorded() -> tuple[dict[str, FileRecord], set[str]]:
        files = _recorded(directory, kind, require_manifest)
        hashed = set(files) if nested_digests else set(read_manifest(directory).files)
        return files, set(files) - hashed if digests else set(files)

    files, measured = on_leader(world, recorded, subject)
    on_all(world, lambda: check_visible(directory), subject)
    share = {name: files[name] for name in list(files)[world.rank :: world.size]}
    shares = gather_or_raise(world, lambda: find_damage(directory, share, measured, _threads(world)), subject)
    problems = {name: problem for share in shares for name, problem in share.items()}
    raise_all(
        CheckpointDamaged,
        f"{subject}: the checkpoint is damaged",
        [problems[name] for name in files if name in problems],
    )
    yield directory


def open_update(meta: WeightUpdateMeta) -> AbstractContextManager[Path]:
    """The model directory of an update by ``disk``; see `open_checkpoint`. Digests are compared by ``verify`` alone."""
    verify = meta.verify
    return open_checkpoint(meta.path or "", Comm(), kind="hf", require_manifest=verify, digests=verify)


def _threads(world: Comm) -> int:
    return max(1, HASHING_THREADS // world.size)


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
