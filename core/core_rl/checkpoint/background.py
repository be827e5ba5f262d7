"""Saves whose files are written while training continues.

All collectives come first: the ranks agree on a temporary directory, and each takes a snapshot. Then a
thread on every rank writes that rank's files and leaves a marker next to them. The thread of rank 0
waits for all markers, seals the directory and renames it into place. No thread talks to another rank.

For a URL each machine has a directory of its own. The threads upload their files, the first rank of each machine then
leaves a marker in the store, and rank 0 waits for those of all machines before it uploads the manifest.

`late_writes` stands for a slow disk: a check sees that a snapshot is one, without waiting for time to pass.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.directory import stage
from core_rl.checkpoint.local import LocalPlace, Workspace
from core_rl.checkpoint.manifest import FileRecord, Manifest, file_names, records_of
from core_rl.checkpoint.remote import RemotePlace, is_url
from core_rl.checkpoint.shards import files_of
from core_rl.distributed.agreement import describe, error_of, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

__all__ = [
    "BackgroundSave",
    "Later",
    "Upload",
    "begin_upload",
    "finish_files",
    "late_writes",
    "publish_later",
]

STORE_POLL_S = 0.5
"""Between two looks at the markers of other machines."""
MARKER = ".machine-"
"""Begins the name of a machine's marker in the store."""


def finish_files(
    staged: Path, finish: Callable[[Path], None] | None, records: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """The records of all files in ``staged``, after ``finish``; those in ``records`` are known."""
    if finish is not None:
        finish(staged)
    rest = [name for name in file_names(staged) if name not in records]
    return {**records, **records_of(staged, rest, threads=1)}


def begin_upload(path: str, staged: Workspace, world: Comm, subject: str, timeout_s: float) -> Upload:
    """Prepare the store for the files of all machines; collective."""
    place = on_all(world, lambda: RemotePlace(path), subject, CheckpointError)
    on_leader(world, place.begin, subject, CheckpointError)
    return Upload(place, staged, world.broadcast(uuid.uuid4().hex), timeout_s)


@dataclass(frozen=True)
class Upload:
    """The second half of a save to a URL, on the first rank of a machine."""

    place: RemotePlace
    staged: Workspace
    token: str
    """Tells the markers of this save from those that a dead one has left."""
    timeout_s: float

    def complete(
        self,
        finish: Callable[[Path], None] | None,
        records: Mapping[str, FileRecord] | None,
        kind: str,
        state: Mapping[str, Any],
    ) -> None:
        """Upload the files of this machine, of which ``records`` are known; on rank 0, then those of the checkpoint.

        No ``records`` at all mean that a rank of this machine has failed.
        """
        if self.staged.rank != 0:
            self._leave_marker(records)
            return
        others = self._await_markers()
        if records is None or others is None:
            return
        directory = self.staged.path
        if finish is not None:  # it reads the files of all ranks
            self.place.download(self.place.root, others, directory)
            others = {}
        own = finish_files(directory, finish, records)
        self.place.upload(directory, own)
        self.place.commit(Manifest.of(kind, state, {**others, **own}))

    def _leave_marker(self, records: Mapping[str, FileRecord] | None) -> None:
        """Upload the files of this machine, and the marker with their records for rank 0, whatever happens."""
        marker = self._marker(self.staged.rank)
        if records is None:
            self.place.write(f"{marker}.failed", b"")
            return
        try:
            own = finish_files(self.staged.path, None, records)
            self.place.upload(self.staged.path, own)
            content = {name: asdict(record) for name, record in own.items()}
            self.place.write(f"{marker}.records", json.dumps(content).encode())
            self.place.write(f"{marker}.done", b"")  # last: a reader may see half of a file in some stores
        except BaseException:
            self.place.write(f"{marker}.failed", b"")
            raise

    def _await_markers(self) -> dict[str, FileRecord] | None:
        """The records of all other machines, or None where one has failed."""
        deadline = time.monotonic() + self.timeout_s
        leaders = set(self.staged.leaders) - {0}
        done, failed = set[int](), set[int]()
        while waiting := leaders - done - failed:
            names = self.place.names()
            done, failed = self._marked(names, "done"), self._marked(names, "failed")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the machine(s) of rank(s) {sorted(waiting)} did not finish writing to {self.place.url} within "
                    f"{self.timeout_s:g} s"
                )
            time.sleep(STORE_POLL_S)
        return None if failed else {name: record for rank in done for name, record in self._records(rank)}

    def _marker(self, rank: int) -> str:
        return f"{MARKER}{self.token}-{rank:05d}"

    def _marked(self, names: Sequence[str], suffix: str) -> set[int]:
        return {rank for rank in self.staged.leaders if f"{self._marker(rank)}.{suffix}" in names}

    def _records(self, rank: int) -> Iterator[tuple[str, FileRecord]]:
        for name, record in json.loads(self.place.read_here(f"{self._marker(rank)}.records")).items():
            yield name, FileRecord(**record)


logger = logging.getLogger(__name__)

POLL_S = 0.02
Write = Callable[[Path], None]
_FREE = threading.Event()
_FREE.set()
_disk: ContextVar[threading.Event] = ContextVar("disk", default=_FREE)
"""Set when saves that begin here may write."""


@contextmanager
def late_writes() -> Iterator[None]:
    """Saves that begin in the background inside the context write nothing before it ends, or somebody waits for them.

    A writer that reads live tensors then always reads what later steps made of them.
    """
    free = threading.Event()
    token = _disk.set(free)
    try:
        yield
    finally:
        _disk.reset(token)
        free.set()


@dataclass(frozen=True)
class Later:
    """Remaining work on the directory of a checkpoint, without collectives."""

    write: Write
    """Every rank writes files of its own, from copies that nobody else changes."""
    finish: Write | None = None
    """Rank 0 makes of all of them what the checkpoint is to hold."""


def publish_later(
    path: str,
    prepare: Callable[[Path], Later],
    world: Comm,
    *,
    kind: str,
    state: Mapping[str, Any],
    timeout_s: float,
) -> BackgroundSave:
    """`publish` in two halves; collective. Returns when every rank has its snapshot.

    ``prepare(directory)`` runs now, may run collectives, and returns what is done later, in a thread.
    Rank 0 gives up when another rank is ``timeout_s`` seconds later than it.

    Raises one `CheckpointError` on all ranks when the first half fails; `BackgroundSave.wait` tells
    of the second.
    """
    subject = f"cannot save {path!r}, and what was there before is untouched"
    with ExitStack() as stack:
        staged = stage(path, state, world, stack, subject)
        later = on_all(world, lambda: prepare(staged.path), subject, CheckpointError)
        store = begin_upload(path, staged, world, subject, timeout_s) if is_url(path) else None
        resources = stack.pop_all()

        def complete() -> None:
            with resources:
                try:
                    _write_part(staged.path, staged.rank, later.write, hashes=later.finish is None)
                finally:
                    # Also after a failure: no other rank writes into the directory any more when it is removed.
                    if staged.leads:
                        records = _await_parts(staged.path, staged.ranks, timeout_s)
                        if store is not None:
                            store.complete(later.finish, records, kind, state)
                        elif records is not None:
                            records = finish_files(staged.path, later.finish, records)
                            LocalPlace(path).commit(staged.path, Manifest.of(kind, state, records))

        return BackgroundSave(path, complete)


class BackgroundSave:
    """One save on its way to the disk, on this rank."""

    def __init__(self, path: str, complete: Callable[[], None]) -> None:
        self.path = path
        self._failure: Exception | None = None
        self._may_write = _disk.get()
        # Not a daemon: a program that ends normally ends when its checkpoint is complete.
        self._thread = threading.Thread(target=self._run, args=(complete,), name=f"save {path}")
        self._thread.start()

    def wait(self, world: Comm) -> None:
        """Return when the checkpoint is in place; collective.

        Raises one `CheckpointError` on all ranks when anything failed on any of them.
        """
        self._may_write.set()
        self._thread.join()
        subject = (
            f"the save of {self.path!r} in the background failed, and what was there before is untouched"
        )
        on_all(world, self._raise_failure, subject, CheckpointError)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, complete: Callable[[], None]) -> None:
        self._may_write.wait()
        self._failure = error_of(complete)  # `wait` raises it
        if self._failure is not None:
            logger.error("the save of %r in the background failed: %s", self.path, describe(self._failure))


def _write_part(staged: Path, rank: int, write: Write, *, hashes: bool) -> None:
    """Write the files of this rank, and leave a marker for rank 0, whatever happens: with the records of its shards,
    where it ``hashes`` them.
    """
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
    """Return when all ``ranks`` have written, with their records, or None if one has failed.

    The markers are gone then.
    """
    deadline = time.monotonic() + timeout_s
    while len(markers := [*staged.glob(".rank-*.done"), *staged.glob(".rank-*.failed")]) < len(ranks):
        if time.monotonic() > deadline:
            waiting = set(ranks) - {int(marker.stem.removeprefix(".rank-")) for marker in markers}
            raise CheckpointError(f"rank(s) {sorted(waiting)} did not finish writing within {timeout_s:g} s")
        time.sleep(POLL_S)
    records: dict[str, FileRecord] = {}
    for marker in markers:
        if marker.suffix == ".done":
            own = json.loads(marker.read_text())
            records |= {name: FileRecord(**record) for name, record in own.items()}
    for marker in staged.glob(".rank-*"):
        marker.unlink()
    return records if all(marker.suffix == ".done" for marker in markers) else None
