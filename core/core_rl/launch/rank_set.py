"""`RankSet`: the rank processes of one group of engines, or of several colocated groups."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence

from core_rl.distributed.process_group import Meeting
from core_rl.errors import EngineStateError, GroupError
from core_rl.launch.hosts import EXIT_WAIT_S, Hosts, Slot
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool
from core_rl.launch.process import start_fork_server
from core_rl.launch.remote import RankInfo


class RankSet:
    """Rank processes, the groups that use them, and the one world of the groups' engines.

    Each group has an engine id, under which the processes keep its engine.
    """

    def __init__(
        self,
        hosts: Hosts,
        machines: Sequence[int] | None,
        devices: Sequence[int] | None,
        threads_per_rank: int | None,
    ) -> None:
        self.threads_per_rank = threads_per_rank
        self._hosts, self._machines, self._devices = hosts, machines, devices
        self.pool = RankPool(hosts)
        self._engine_ids = itertools.count()
        self._worlds = itertools.count()
        self._engines: dict[int, list[RankInfo]] = {}
        """For each registered group the ranks of its engine, none while it has no engine."""
        self._store_port: int | None = None
        """Port of the first rank's store."""
        self._meeting: Meeting | None = None

    def register(self, group: object) -> int:
        """A new engine id, which keeps the processes until `release`, or until ``group`` is collected."""
        engine_id = next(self._engine_ids)
        self._engines[engine_id] = []
        weakref.finalize(group, self._engines.pop, engine_id, None).atexit = False
        return engine_id

    def release(self, engine_id: int, wait_s: float = EXIT_WAIT_S) -> None:
        """End the processes if no other group is registered, or if the group of ``engine_id`` is in a call.

        Raises `GroupError` while another group is in a call. Further calls do nothing.
        """
        if engine_id not in self._engines:
            return
        caller = self.pool.caller
        if len(self._engines) > 1 and caller not in (None, engine_id):
            raise GroupError(
                "a group that is colocated with this one is in a call; close this one afterwards"
            )
        self.set_engine(engine_id, [])
        self._engines.pop(engine_id, None)
        if not self._engines or caller == engine_id:
            self.pool.close(wait_s)

    def restart(self, engine_id: int) -> None:
        """Replace the processes by new ones, without engines; a group that was released is registered again."""
        self.pool.close(wait_s=0.0)
        self.pool = RankPool(self._hosts)
        self._store_port = None
        self._engines[engine_id] = []
        for colocated in self._engines:
            self.set_engine(colocated, [])

    def check_open(self, engine_id: int) -> None:
        """Raise `GroupError` if the processes are gone, or the group was closed."""
        self.pool.check()
        if engine_id not in self._engines:
            raise GroupError("this group has ended: it was closed. Start a new one, or call restart()")

    # ---------------------------------------------------------------- places

    def slots(self, count: int) -> list[Slot]:
        """The places of ``count`` ranks, of which the first stay theirs when there are more; raises `ConfigError`."""
        return self._hosts.slots(count, self._machines, self._devices)

    def preload(self, modules: Sequence[str]) -> None:
        """Have ranks of the driver's machine inherit ``modules``, if they are the first of the program."""
        if self._hosts.driver_address is None:
            start_fork_server(modules)

    def threads(self, slots: Sequence[Slot]) -> list[int]:
        """Threads of each rank: ``threads_per_rank``, or its share of the cores of its machine."""
        if self.threads_per_rank is not None:
            return [self.threads_per_rank] * len(slots)
        neighbours = Counter(slot.machine for slot in slots)
        return [max(1, self._hosts.cores(slot.machine) // neighbours[slot.machine]) for slot in slots]

    # --------------------------------------------------------------- engines

    def engine(self, engine_id: int) -> list[RankInfo]:
        """The ranks of an engine; empty unless it is initialized."""
        return self._engines.get(engine_id, [])

    def ready_engine(self, engine_id: int, name: str) -> list[RankInfo]:
        """The ranks of an engine; raises `GroupError` after the end, and `EngineStateError` before `initialize`."""
        self.check_open(engine_id)
        if not (ranks := self._engines[engine_id]):
            raise EngineStateError(f"the group of {name!r} has no engine; call initialize() first")
        return ranks

    def set_engine(self, engine_id: int, ranks: list[RankInfo]) -> None:
        """Record the ranks of an engine that has joined the world; an empty list for an engine that left it."""
        if engine_id in self._engines:
            self._engines[engine_id] = ranks
        if not any(self._engines.values()):
            self._meeting = None

    def check_world(self, engine_id: int, size: int) -> None:
        """Raise `EngineStateError` unless the engine can have a world of ``size`` ranks."""
        sizes = {len(ranks) for other_id, ranks in self._engines.items() if ranks and other_id != engine_id}
        if sizes - {size}:
            raise EngineStateError(
                f"this engine needs {size} ranks, and the colocated engine has {sizes.pop()}; destroy() "
                "that one first, or start this group without colocate_with"
            )

    def meeting(self, engine_id: int, machine: int, timeout_s: float) -> Meeting:
        """Rendezvous of the present world, or of a new world, on the first rank's ``machine``."""
        host = self._hosts.address_of(machine)
        if self._store_port is None:
            (self._store_port,) = self.pool.call(Call(engine_id, "open_store", (host,)), [()], timeout_s)
        if self._meeting is None:
            self._meeting = Meeting(host=host, port=self._store_port, name=f"world {next(self._worlds)}")
        return self._meeting
