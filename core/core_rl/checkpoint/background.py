"""Saves whose files are written while training continues.

All collectives come first: the ranks agree on a temporary directory, and each takes a snapshot. Then a
thread on every rank writes that rank's files and leaves a marker next to them. The thread of rank 0
waits for all markers, writes the manifest and renames it into place. No thread talks to another rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from core_rl.checkpoint.directory import LocalStorage, stage
from core_rl.checkpoint.manifest import FileRecord, Manifest, file_names, records_of
from core_rl.distributed.agreement import describe, error_of, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

logger = logging.getLogger(__name__)

Write = Callable[[Path], None]
POLL_S = 0.02
"""Seconds between two looks at the markers of ranks."""


@dataclass(frozen=True)
class DeferredWrite:
    """Remaining work on the directory of a checkpoint, without collectives."""

    write: Write
    """Writes the files of this rank, from copies that no other code changes."""
    finish: Write | None = None
    """Makes the last files on rank 0, when all ranks have written."""
    final: str | None = None
    """Pattern of the files of this rank that ``finish`` leaves as they are: the rank hashes them itself."""

    def run(self, directory: Path, world: Comm) -> None:
        """Do all of it now; collective. Raises one `CheckpointError` on all ranks."""
        on_all(world, lambda: self.write(directory), "the files of all ranks", CheckpointError)
        if self.finish is not None:
            finish = self.finish
            on_leader(world, lambda: finish(directory), "the last files", CheckpointError)


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
        deferred = on_all(world, lambda: prepare(staged), subject, CheckpointError)
        resources = stack.pop_all()

        def complete() -> None:
            records = None
            with resources:
                try:
                    _write_part(staged, world.rank, deferred)
                finally:
                    # Also after a failure: no other rank writes into the directory any more when it is removed.
                    if world.rank == 0:
                        records = _await_parts(staged, world.size, timeout_s)
                if records is not None:
                    if deferred.finish is not None:
                        deferred.finish(staged)
                    rest = [name for name in file_names(staged) if name not in records]
                    records = {**records, **records_of(staged, rest, threads=1)}
                    LocalStorage(path).commit(staged, Manifest.of(kind, state, records))

        return BackgroundSave(path, complete)


class BackgroundSave:
    """One save on its way to the disk, on this rank."""

    def __init__(self, path: str, complete: Callable[[], None]) -> None:
        """``complete()`` runs in a thread."""
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
        on_all(world, self._result, subject, CheckpointError)

    def _result(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, complete: Callable[[], None]) -> None:
        self._failure = error_of(complete)  # `wait` raises it
        if self._failure is not None:
            logger.error("the save of %r in the background failed: %s", self.path, describe(self._failure))


def _write_part(staged: Path, rank: int, deferred: DeferredWrite) -> None:
    """Write the files of this rank, and a marker with the records of its final ones, or of a failure."""
    marker = staged / f".rank-{rank:05d}"
    try:
        deferred.write(staged)
        final = sorted(staged.glob(deferred.final)) if deferred.final is not None else []
        names = [file.relative_to(staged).as_posix() for file in final]
        records = {name: asdict(record) for name, record in records_of(staged, names, threads=1).items()}
        marker.with_suffix(".writing").write_text(json.dumps(records))
        marker.with_suffix(".writing").rename(marker.with_suffix(".done"))
    except BaseException:
        marker.with_suffix(".failed").touch()  # empty: a full disk takes it
        raise


def _await_parts(staged: Path, ranks: int, timeout_s: float) -> dict[str, FileRecord] | None:
    """Records of all ``ranks``, their number, when they have written, or None if a rank failed; removes the markers."""
    deadline = time.monotonic() + timeout_s
    while len(markers := [*staged.glob(".rank-*.done"), *staged.glob(".rank-*.failed")]) < ranks:
        if time.monotonic() > deadline:
            waiting = set(range(ranks)) - {int(marker.stem.removeprefix(".rank-")) for marker in markers}
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
