"""Saves whose files are written while training continues.

All collectives come first: the ranks agree on a temporary directory, and each takes a snapshot. Then a
thread on every rank writes that rank's files and leaves a marker next to them. The thread of rank 0
waits for all markers, seals the directory and renames it into place. No thread talks to another rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.directory import place_of, staged_on_leader
from core_rl.checkpoint.manifest import seal
from core_rl.distributed.agreement import describe, on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

__all__ = ["BackgroundSave", "Later", "publish_later"]

logger = logging.getLogger(__name__)

POLL_S = 0.02
Write = Callable[[Path], None]


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
        staged = staged_on_leader(path, state, world, stack, subject)
        later = on_all(world, lambda: prepare(staged), subject, CheckpointError)

        def commit() -> None:
            _await_parts(staged, world_size, timeout_s)
            if later.finish is not None:
                later.finish(staged)
            seal(staged, kind, state, in_background=True)
            place_of(path).commit(staged)

        world_size = world.size
        save = BackgroundSave(path, staged, world.rank, later.write)
        save.begin(commit if world.rank == 0 else None, stack.pop_all())
        return save


class BackgroundSave:
    """One save on its way to the disk, on this rank."""

    def __init__(self, path: str, staged: Path, rank: int, write: Write) -> None:
        self.path = path
        self._staged = staged
        self._rank = rank
        self._write: Write | None = write
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self, commit: Callable[[], None] | None, stack: ExitStack) -> None:
        """Write this rank's part in a thread, and on rank 0 then ``commit``; ``stack`` is closed at the end."""
        # Not a daemon: a program that ends normally ends when its checkpoint is complete.
        self._thread = threading.Thread(target=self._run, args=(commit, stack), name=f"save {self.path}")
        self._thread.start()

    def wait(self, world: Comm) -> None:
        """Return when the checkpoint is in place; collective.

        Raises one `CheckpointError` on all ranks when anything failed on any of them.
        """
        assert self._thread is not None
        self._thread.join()
        subject = (
            f"the save of {self.path!r} in the background failed, and what was there before is untouched"
        )
        on_all(world, self._raise_failure, subject, CheckpointError)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, commit: Callable[[], None] | None, stack: ExitStack) -> None:
        with stack:
            self._attempt(self._write_part)
            if commit is not None:
                # Also after a failure: it waits until no other rank writes into the directory any more.
                self._attempt(commit)

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except _ElsewhereError:
            pass  # who failed tells
        except Exception as error:  # noqa: BLE001  # nobody is there to catch it: `wait` raises it
            self._failure = self._failure or error
            logger.error("the save of %r in the background failed: %s", self.path, describe(error))

    def _write_part(self) -> None:
        """Write, and tell rank 0 how it went, whatever happens."""
        assert self._write is not None
        outcome = "failed"
        try:
            self._write(self._staged)
            outcome = "done"
        finally:
            self._write = None  # the snapshot's memory
            _marker(self._staged, self._rank, outcome).touch()  # empty: a full disk takes it


class _ElsewhereError(Exception):
    """Some rank could not write its part."""


def _marker(staged: Path, rank: int, outcome: str) -> Path:
    return staged / f".rank-{rank:05d}.{outcome}"


def _await_parts(staged: Path, world_size: int, timeout_s: float) -> None:
    """Return when all ranks have written; the markers are gone then."""
    deadline = time.monotonic() + timeout_s
    waiting = set(range(world_size))
    failed = False
    while waiting:
        for rank in list(waiting):
            for outcome in ("done", "failed"):
                marker = _marker(staged, rank, outcome)
                if marker.exists():
                    marker.unlink()
                    waiting.discard(rank)
                    failed |= outcome == "failed"
        if waiting and time.monotonic() > deadline:
            raise CheckpointError(f"rank(s) {sorted(waiting)} did not finish writing within {timeout_s:g} s")
        if waiting:
            time.sleep(POLL_S)
    if failed:
        raise _ElsewhereError
