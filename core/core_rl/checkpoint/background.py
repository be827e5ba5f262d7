"""Saves whose files are written while training continues.

All collectives come first: the ranks agree on a temporary directory, and each takes a snapshot. Then a
thread on every rank writes that rank's files and leaves a marker next to them. The thread of rank 0
waits for all markers, writes the manifest and renames it into place. No thread talks to another rank.

For a URL each machine has a directory of its own. The threads upload their files, the first rank of each machine then
leaves a marker in the store, and rank 0 uploads the manifest when all markers are there.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from core_rl.checkpoint.directory import stage
from core_rl.checkpoint.local import LocalStorage, Workspace
from core_rl.checkpoint.manifest import FileRecord, Manifest, file_names, records_of
from core_rl.checkpoint.remote import RemoteStorage, is_url
from core_rl.checkpoint.shards import files_of
from core_rl.distributed.agreement import describe, error_of, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

__all__ = ["BackgroundSave", "DeferredWrite", "Write", "write_in_background"]

logger = logging.getLogger(__name__)

Write = Callable[[Path], None]
POLL_S = 0.02
"""Seconds between two looks at the markers of ranks."""
STORE_POLL_S = 0.5
"""Seconds between two looks at the markers of other machines."""
MARKER = ".machine-"
"""Begins the name of a machine's marker in the store."""


@dataclass(frozen=True)
class DeferredWrite:
    """Remaining work on the directory of a checkpoint, without collectives."""

    write: Write
    """Writes the files of this rank, from copies that no other code changes."""
    finish: Write | None = None
    """Makes the final files on rank 0, when all ranks have written."""


def write_in_background(
    path: str,
    prepare: Callable[[Path], DeferredWrite],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any],
    timeout_s: float,
) -> BackgroundSave:
    """Save as `write_checkpoint` does, but return when every rank has its snapshot; collective.

    ``prepare(directory)`` runs at once, may run collectives, and returns the work for a thread. Rank 0 fails when
    another rank writes ``timeout_s`` seconds longer.

    Raises one `CheckpointError` on all ranks when ``prepare`` fails; `BackgroundSave.wait` raises later errors.
    """
    subject = f"cannot save {path!r}, and what was there before is untouched"
    with ExitStack() as stack:
        staged = stage(path, state, world, stack, subject)
        deferred = on_all(world, lambda: prepare(staged.path), subject, CheckpointError)
        store = _begin_upload(path, staged, world, subject, timeout_s) if is_url(path) else None
        resources = stack.pop_all()

        def complete() -> None:
            with resources:
                try:
                    _write_part(staged.path, staged.rank, deferred.write, hashes=deferred.finish is None)
                finally:
                    # Also after a failure: no other rank writes into the directory any more when it is removed.
                    if staged.leads:
                        records = _await_parts(staged.path, staged.ranks, timeout_s)
                        if store is not None:
                            store.complete(deferred.finish, records, kind, state)
                        elif records is not None:
                            records = _finish_files(staged.path, deferred.finish, records)
                            LocalStorage(path).commit(staged.path, Manifest.of(kind, state, records))

        return BackgroundSave(path, complete)


class BackgroundSave:
    """One save on its way to the disk, on this rank."""

    def __init__(self, path: str, complete: Callable[[], None]) -> None:
        self.path = path
        self._failure: Exception | None = None
        # Not a daemon: a program that ends normally ends when its checkpoint is complete.
        self._thread = Thread(target=self._run, args=(complete,), name=f"save {path}")
        self._thread.start()

    def wait(self, world: Comm) -> None:
        """Return when the checkpoint is in place; collective.

        Raises one `CheckpointError` on all ranks when anything failed on any of them.
        """
        self._thread.join()
        subject = (
            f"the save of {self.path!r} in the background failed, and what was there before is untouched"
        )
        on_all(world, self._raise_failure, subject, CheckpointError)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, complete: Callable[[], None]) -> None:
        self._failure = error_of(complete)  # `wait` raises it
        if self._failure is not None:
            logger.error("the save of %r in the background failed: %s", self.path, describe(self._failure))


def _write_part(staged: Path, rank: int, write: Write, *, hashes: bool) -> None:
    """Write the files of this rank and a marker with the records of its shards, if it ``hashes`` them, or a failure."""
    marker = staged / f".rank-{rank:05d}"
    try:
        write(staged)
        names = [file.relative_to(staged).as_posix() for file in files_of(staged, rank)] if hashes else []
        records = {name: asdict(record) for name, record in records_of(staged, names, threads=1).items()}
        marker.with_suffix(".writing").write_text(json.dumps(records))
        marker.with_suffix(".writing").rename(marker.with_suffix(".done"))
    except BaseException:
        marker.with_suffix(".failed").touch()  # empty: a full disk takes it
        raise


def _await_parts(staged: Path, ranks: Sequence[int], timeout_s: float) -> dict[str, FileRecord] | None:
    """Records of all ``ranks`` when they have written, or None if a rank failed; removes the markers."""
    deadline = time.monotonic() + timeout_s
    while len(markers := [*staged.glob(".rank-*.done"), *staged.glob(".rank-*.failed")]) < len(ranks):
        if time.monotonic() > deadline:
            waiting = set(ranks) - {int(marker.stem.removeprefix(".rank-")) for marker in markers}
            raise CheckpointError(f"rank(s) {sorted(waiting)} did not finish writing within {timeout_s:g} s")
        time.sleep(POLL_S)
    records: dict[str, FileRecord] = {}
    for marker in markers:
        if marker.suffix == ".done":
            for name, record in json.loads(marker.read_text()).items():
                records[name] = FileRecord(**record)
    for marker in staged.glob(".rank-*"):
        marker.unlink()
    return records if all(marker.suffix == ".done" for marker in markers) else None


def _finish_files(
    staged: Path, finish: Write | None, records: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """Records of all files in ``staged`` after ``finish``, with the known ``records``."""
    if finish is not None:
        finish(staged)
    rest = [name for name in file_names(staged) if name not in records]
    return {**records, **records_of(staged, rest, threads=1)}


def _begin_upload(path: str, staged: Workspace, world: Comm, subject: str, timeout_s: float) -> _Upload:
    """Prepare the store for the files of all machines; collective."""
    store = on_all(world, lambda: RemoteStorage(path), subject, CheckpointError)
    on_leader(world, store.begin, subject, CheckpointError)
    return _Upload(store, staged, world.broadcast(uuid.uuid4().hex), timeout_s)


@dataclass(frozen=True)
class _Upload:
    """The second half of a save to a URL, on the first rank of a machine."""

    store: RemoteStorage
    staged: Workspace
    token: str
    """Distinguishes the markers of this save from markers of a dead save."""
    timeout_s: float

    def complete(
        self,
        finish: Write | None,
        records: Mapping[str, FileRecord] | None,
        kind: str,
        state: Mapping[str, Any],
    ) -> None:
        """Upload the files of this machine, and on rank 0 the manifest; ``records`` are None if a rank here failed."""
        if self.staged.rank != 0:
            self._leave_marker(records)
            return
        uploaded = self._await_markers()
        if records is None or uploaded is None:
            return
        directory = self.staged.path
        if finish is not None:  # it reads the files of all ranks
            self.store.download(self.store.root, uploaded, directory)
            uploaded = {}
        local = _finish_files(directory, finish, records)
        self.store.upload(directory, local)
        self.store.commit(Manifest.of(kind, state, {**uploaded, **local}))

    def _leave_marker(self, records: Mapping[str, FileRecord] | None) -> None:
        """Upload the files of this machine and a marker with their records for rank 0, or a marker of failure."""
        marker = self._marker(self.staged.rank)
        if records is None:
            self.store.write(f"{marker}.failed", b"")
            return
        try:
            records = _finish_files(self.staged.path, None, records)
            self.store.upload(self.staged.path, records)
            content = {name: asdict(record) for name, record in records.items()}
            self.store.write(f"{marker}.records", json.dumps(content).encode())
            self.store.write(f"{marker}.done", b"")  # last: a reader may see half of a file in some stores
        except BaseException:
            self.store.write(f"{marker}.failed", b"")
            raise

    def _await_markers(self) -> dict[str, FileRecord] | None:
        """Records of all other machines, or None if a machine failed."""
        deadline = time.monotonic() + self.timeout_s
        leaders = set(self.staged.leaders) - {0}
        done, failed = set[int](), set[int]()
        while waiting := leaders - done - failed:
            names = self.store.names()
            done, failed = self._marked(names, "done"), self._marked(names, "failed")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the machine(s) of rank(s) {sorted(waiting)} did not finish writing to {self.store.url} within "
                    f"{self.timeout_s:g} s"
                )
            time.sleep(STORE_POLL_S)
        return None if failed else {name: record for rank in done for name, record in self._records(rank)}

    def _marker(self, rank: int) -> str:
        return f"{MARKER}{self.token}-{rank:05d}"

    def _marked(self, names: Sequence[str], suffix: str) -> set[int]:
        return {rank for rank in self.staged.leaders if f"{self._marker(rank)}.{suffix}" in names}

    def _records(self, rank: int) -> Iterator[tuple[str, FileRecord]]:
        for name, record in json.loads(self.store.read_here(f"{self._marker(rank)}.records")).items():
            yield name, FileRecord(**record)
