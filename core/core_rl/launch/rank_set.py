"""`RankSet`: the rank processes of one group of engines, or of several groups that share them."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

from core_rl.errors import EngineStateError, GroupError
from core_rl.launch.pool import EXIT_WAIT_S, RankPool
from core_rl.launch.remote import Place

__all__ = ["RankSet"]


class RankSet:
    """Rank processes, the groups whose engines live in them, and the one world that these engines are in.

    Each group has a seat: a number under which the processes keep its engine.
    """

    def __init__(self, threads_per_rank: int | None, devices: Sequence[int] | None) -> None:
        self.devices = devices
        self.pool = RankPool()
        self._threads_per_rank = threads_per_rank
        self._groups: WeakSet[object] = WeakSet()
        self._seats = itertools.count()
        self._places: dict[int, list[Place]] = {}
        self._meeting: tempfile.TemporaryDirectory[str] | None = None

    def threads(self, size: int) -> int:
        """How many threads one of ``size`` ranks computes with."""
        return self._threads_per_rank or max(1, _cores() // size)

    # ---------------------------------------------------------------- groups

    def enter(self, group: object) -> int:
        """A seat for ``group``, which has the processes until it `leave`s them or is forgotten."""
        self._groups.add(group)
        return next(self._seats)

    def check_free(self, seat: int) -> None:
        """Raise `GroupError` while another group of several is in a call: its ranks cannot be left then."""
        if len(self._groups) > 1 and self.pool.caller not in (None, seat):
            raise GroupError(
                "a group that shares the processes of this one is in a call; close this one afterwards"
            )

    def leave(self, group: object, seat: int, wait_s: float = EXIT_WAIT_S) -> None:
        """Give the seat up; the processes end with the last group, or now if ``group`` is in a call."""
        self.forget(seat)
        self._groups.discard(group)
        if not self._groups or self.pool.caller == seat:
            self.pool.close(wait_s)

    def restart(self) -> None:
        """Replace the processes by new ones. No group has an engine then."""
        self.pool.close(wait_s=0.0)
        self.pool = RankPool()
        for seat in list(self._places):
            self.forget(seat)

    # ----------------------------------------------------------------- world

    def places(self, seat: int) -> list[Place]:
        """Where the ranks of the engine at ``seat`` stand; empty while it has none."""
        return self._places.get(seat, [])

    def settle(self, seat: int, places: list[Place]) -> None:
        """The engine at ``seat`` has joined the world, and stands there."""
        self._places[seat] = places

    def forget(self, seat: int) -> None:
        """The engine at ``seat`` is gone; with the last one, so is the world."""
        self._places.pop(seat, None)
        if not self._places and self._meeting is not None:
            self._meeting.cleanup()
            self._meeting = None

    def check_world(self, seat: int, size: int) -> None:
        """Raise `EngineStateError` unless the engine at ``seat`` can have a world of ``size`` ranks."""
        others = {len(places) for other, places in self._places.items() if other != seat}
        if others - {size}:
            raise EngineStateError(
                f"this engine wants {size} ranks, and the one that shares its processes has {others.pop()}; destroy() "
                "that one first, or start this group without beside"
            )

    def store(self) -> str:
        """The file through which the ranks meet: that of the world that is there, or of a new one."""
        if self._meeting is None:
            # A new file for each world: a store serves one process group.
            self._meeting = tempfile.TemporaryDirectory(prefix="core-rl-", ignore_cleanup_errors=True)
        return str(Path(self._meeting.name) / "store")


def _cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
