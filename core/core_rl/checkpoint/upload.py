"""The second half of a save in the background to an fsspec URL: files of several machines, and one manifest."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.manifest import FileRecord, Manifest, file_names, records_of
from core_rl.checkpoint.remote import RemotePlace
from core_rl.checkpoint.workspace import Workspace
from core_rl.distributed.agreement import on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

__all__ = ["Upload", "begin_upload", "finish_files"]

POLL_S = 0.5
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
            time.sleep(POLL_S)
        return None if failed else {name: record for rank in done for name, record in self._records(rank)}

    def _marker(self, rank: int) -> str:
        return f"{MARKER}{self.token}-{rank:05d}"

    def _marked(self, names: Sequence[str], suffix: str) -> set[int]:
        return {rank for rank in self.staged.leaders if f"{self._marker(rank)}.{suffix}" in names}

    def _records(self, rank: int) -> Iterator[tuple[str, FileRecord]]:
        for name, record in json.loads(self.place.read_here(f"{self._marker(rank)}.records")).items():
            yield name, FileRecord(**record)
