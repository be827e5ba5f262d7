"""Processes on machines of `Hosts` outside of any group: for one call, and for servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

from core_rl.errors import ConfigError, GroupError
from core_rl.launch.hosts import Hosts, Slot
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")
NO_ENGINE = 0
ONE_CALL_S = 120.0
"""The time limit of the call, in seconds."""
CALL_S = 60.0
"""Time limit of a call: starting a server does not wait until it is ready."""


def call_on_machines(
    hosts: Hosts, machines: Sequence[int], fn: Callable[[*ArgTs], ResultT], *args: *ArgTs
) -> dict[int, ResultT]:
    """``fn(*args)`` once on each of ``machines``, in a process that ends afterwards; the results by machine.

    ``fn``, ``args`` and the results are pickled. Raises the error of the first machine that fails, and `GroupError`
    where a process does not come up, ends, or does not answer within two minutes.
    """
    pool = RankPool(hosts)
    try:
        pool.grow(hosts.slots(len(machines), machines, [0]))
        results = pool.call(Call(NO_ENGINE, "run_alone", (fn, args)), [()] * len(machines), ONE_CALL_S)
        return dict(zip(machines, results, strict=True))
    finally:
        pool.close()


def server_processes(
    hosts: Hosts,
    servers: int,
    ranks_per_server: int = 1,
    machines: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
) -> list[HostProcess]:
    """A process for each of ``servers`` servers, with ``ranks_per_server`` devices of one machine each.

    Servers fill one machine after the other: ``machines`` and, on each, ``devices``, as for `EngineGroup`. Nothing is
    started yet. Raises `ConfigError` where they have no room, or where a server's devices are on two machines.
    """
    slots = hosts.slots(servers * ranks_per_server, machines, devices)
    shares = [slots[first : first + ranks_per_server] for first in range(0, len(slots), ranks_per_server)]
    split = [number for number, share in enumerate(shares) if len({slot.machine for slot in share}) > 1]
    if split:
        raise ConfigError(
            f"servers {split} of {ranks_per_server} ranks would lie on two machines each; choose a multiple of "
            f"{ranks_per_server} devices on each machine"
        )
    return [HostProcess(hosts, share) for share in shares]


class HostProcess:
    """A process on a machine, for one server; its children end with it. Any thread may call it."""

    def __init__(self, hosts: Hosts, slots: Sequence[Slot]) -> None:
        self.machine = slots[0].machine
        """The number of the machine."""
        self.devices = tuple(slot.device for slot in slots)
        """The accelerators of the server there."""
        self._hosts, self._slot = hosts, slots[0]
        self._pool: RankPool | None = None
        self._calling = threading.Lock()

    @property
    def address(self) -> str:
        """The address under which other machines reach this one. Raises `GroupError` for a lost machine."""
        return self._hosts.address_of(self.machine)

    def start(self) -> None:
        """Start the process, again where it is gone. Raises `GroupError`."""
        with self._calling:
            if self._pool is not None and self._pool.is_idle:
                return
            self._pool = RankPool(self._hosts)
            self._pool.grow([self._slot])

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` in the process; ``fn`` is a function of a module. Raises its error, and `GroupError`."""
        with self._calling:
            if self._pool is None:
                raise GroupError("the process of this server was not started; call start() first")
            return self._pool.call(Call(0, "run_alone", (fn, args)), [()], CALL_S)[0]

    def close(self) -> None:
        """End the process and its children. Further calls do nothing."""
        with self._calling:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()
