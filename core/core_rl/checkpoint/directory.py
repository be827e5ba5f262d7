"""A checkpoint in a directory of all ranks: replaced as a whole or not at all, and verified when it is opened.

A save is written to a temporary sibling ``.NAME.tmp-…`` and renamed. To replace ``NAME``, the old
directory is first renamed to ``.NAME.core-rl-old``; if the process dies between the two renames, readers
find the old one there, and the next save puts it back.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.manifest import (
    HASHING_THREADS,
    MANIFEST,
    FileRecord,
    Manifest,
    all_files,
    check_ours,
    file_names,
    find_damage,
    flush,
    read_manifest,
    records_of,
    to_json,
    write_manifest,
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

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}$")
STALE_AFTER_S = 24 * 3600.0


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


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL and not a local path."""
    return "://" in path


class LocalStorage:
    """A local directory as a place for a checkpoint."""

    def __init__(self, path: str) -> None:
        """Raises `CheckpointError` for a URL, and for a path without a name."""
        if is_url(path):
            raise CheckpointError(
                f"{path!r} is a URL; name a local directory, and copy it to or from the store"
            )
        self.path = Path(path).expanduser().resolve()
        if not self.path.name:
            raise CheckpointError(f"{path!r} cannot be a checkpoint; name a directory")
        self.old = self.path.with_name(f".{self.path.name}.core-rl-old")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty directory next to the checkpoint path, removed at the end unless `commit` took it.

        Raises `CheckpointError` if something that is not a checkpoint is at the path.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._occupied():
            check_ours(self.manifest_bytes(), str(self.path))
        elif self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file; choose another path, or remove it")
        if self._occupied():
            shutil.rmtree(self.old, ignore_errors=True)
        elif self.old.exists():
            self.old.rename(self.path)
        remove_stale(self.path.parent, f".{self.path.name}.")
        staged = _temporary(self.path)
        staged.mkdir()
        try:
            with in_use(staged):
                yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def commit(self, staged: Path, manifest: Manifest) -> None:
        """Put the directory ``staged`` in place, with the ``manifest`` of its files."""
        write_manifest(staged, manifest)
        if self._occupied():
            self.path.rename(self.old)
            try:
                staged.rename(self.path)
            except OSError:
                self.old.rename(self.path)
                raise
        else:
            staged.rename(self.path)
        flush(self.path.parent)
        shutil.rmtree(self.old, ignore_errors=True)

    @contextmanager
    def linked(self) -> Iterator[Path]:
        """A directory with links to the files of the checkpoint, which stay when another process removes it.

        The checkpoint itself where no links can be made. Raises `CheckpointNotFound` where it is gone.
        """
        with ExitStack() as stack:
            yield self._link(stack)

    def _link(self, stack: ExitStack) -> Path:
        links = _temporary(self.path)
        try:
            links.mkdir()
            stack.callback(shutil.rmtree, links, ignore_errors=True)
            stack.enter_context(in_use(links))
            shutil.copytree(self.current(), links, copy_function=os.link, dirs_exist_ok=True)
        except OSError as error:
            if not self.current().is_dir():
                raise CheckpointNotFound(f"{self.path} was removed by another process") from error
            return self.current()
        return links

    def current(self) -> Path:
        """Directory of the checkpoint: its own path, or the one to which a save that died had moved it."""
        return self.old if not self._occupied() and self.old.exists() else self.path

    def remove(self) -> None:
        """Remove the checkpoint; dying halfway leaves a temporary directory, never half a checkpoint."""
        for directory in (self.old, self.path):
            if directory.exists():
                doomed = _temporary(self.path)
                directory.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def manifest_bytes(self) -> bytes | None:
        """The manifest's text, or None where there is none."""
        file = self.current() / MANIFEST
        return file.read_bytes() if file.is_file() else None

    def _occupied(self) -> bool:
        return self.path.is_dir() and any(self.path.iterdir())


def _temporary(path: Path) -> Path:
    # Not tempfile.mkdtemp: its directories are closed to other users, and this one becomes the checkpoint.
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")


def is_temporary(directory: Path) -> bool:
    """Whether ``directory`` is a temporary directory of a save."""
    return TEMPORARY.search(directory.name) is not None


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep a temporary directory from `remove_stale`, until the context or the process ends; several processes may."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Some file systems (NFS) have no locks on directories: there, `_is_stale` goes by age.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove temporary directories in ``parent`` whose names start with ``prefix`` and whose writer is gone."""
    for entry in parent.iterdir():
        if entry.name.startswith(prefix) and is_temporary(entry) and _is_stale(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # removed by now, or of another user
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > STALE_AFTER_S
    finally:
        os.close(descriptor)


def check_visible(directory: Path) -> None:
    """Raise `CheckpointError` on a rank that does not see what rank 0 made."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} does not exist here; all ranks must see one file system. Name a directory that all machines "
            "share"
        )
