"""`AgentHosts`: several machines with an agent on each, however the agents are started."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from multiprocessing import util
from types import TracebackType
from typing import Self

from core_rl.distributed.authentication import new_key
from core_rl.errors import ClusterError, ConfigError, GroupError
from core_rl.launch.hosts import Rank, Slot, end_ranks
from core_rl.machine import most_open_files
from core_rl_cluster.environment import shared_environment
from core_rl_cluster.hello import MachineInfo
from core_rl_cluster.link import AgentLink, AgentRank
from core_rl_cluster.listener import AgentListener
from core_rl_cluster.network import own_address

__all__ = ["AGENT", "AgentHosts"]

AGENTS_S = 60.0
"""The shortest wait for agents that were launched, where the wait for their machines has taken all of ``wait_s``."""
CONNECT_S = 120.0
"""The longest wait for connections of ranks that were asked for; the agent may still import torch."""
FILES_PER_RANK = 3
"""Open files of the driver: a connection, and a pipe that shows the end of the rank."""
SPARE_FILES = 128
"""Open files of everything else in the driver."""
LOOK_S = 0.2
"""Seconds between two looks at launched processes."""
AGENT = ("-m", "core_rl.cli", "agent")
"""Arguments of a Python that runs an agent."""


@dataclass(eq=False, repr=False)
class AgentHosts(ABC):
    """``machines`` machines, on each of which an agent starts up to ``ranks_per_machine`` ranks of each group.

    The agents connect to the driver at ``address``, by default that of its host name, and ``port``, by
    default a free one; all have to come within ``wait_s`` seconds, waits for machines included, or at least
    ``fewest``, which then are all that there are. A machine from which nothing comes for ``lease_s`` seconds is lost,
    and ends its ranks by itself. Ranks get the environment of their machine, a few of the driver's variables that mean
    the same everywhere, and the variables named in ``environment``.

    The machines are started at first use, or by entering the context, and let go by `close`, or when the driver ends.
    """

    machines: int
    ranks_per_machine: int = 1
    _: KW_ONLY
    address: str | None = None
    port: int = 0
    wait_s: float = 300.0
    lease_s: float = 30.0
    fewest: int | None = None
    environment: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("machines", "ranks_per_machine"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} = {value}; it must be positive")
        if self.fewest is not None and not 1 <= self.fewest <= self.machines:
            raise ConfigError(f"fewest = {self.fewest}; it must lie between 1 and machines, {self.machines}")
        for name in ("wait_s", "lease_s"):
            if not (seconds := getattr(self, name)) > 0:
                raise ConfigError(f"{name} = {seconds}; it must be positive")
        self._listener: AgentListener | None = None
        self._deadline = 0.0
        """When all machines have to be there, by the monotonic clock; known from `open` on."""
        self._rank_ids = itertools.count()
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------- how agents start

    def _key(self) -> bytes:
        """The key that agents have to know; a new one where they are started for this object."""
        return new_key()

    def _own_address(self) -> str:
        """The address of the driver towards the machines; raises `ConfigError` or `ClusterError`."""
        return own_address("address (cluster.address in a recipe)")

    @abstractmethod
    def _launch(self, driver: str, key: bytes) -> None:
        """Start the agents, which connect to ``driver`` (``HOST:PORT``); raises `ClusterError` or `ConfigError`."""

    def _check_launched(self) -> None:  # noqa: B027  (agents that others start are not known)
        """Raise `ClusterError` where a launched process has failed, and agents will not come."""

    def _end_launched(self) -> None:  # noqa: B027  (those end by themselves when they are let go)
        """End launched processes, whose agents were let go. Further calls do nothing."""

    # ------------------------------------------------------------------ hosts

    def open(self) -> None:
        """Have an agent on each machine; raises `ClusterError` with the missing machines. Further calls do nothing."""
        with self._starting:
            if self._listener is not None:
                return
            self._require_files()
            key = self._key()
            self._deadline = time.monotonic() + self.wait_s
            try:
                address = self.address or self._own_address()
                self._listener = AgentListener(address, self.port, key, self.machines, self.lease_s)
                # For hosts that are forgotten, and before `multiprocessing` waits for its processes.
                util.Finalize(self, AgentListener.close, args=(self._listener,), exitpriority=50)
                self.launch_in_time(self._listener.endpoint, key)
                self._wait_for_agents(self._listener)
            except BaseException:
                self._close()
                raise

    def close(self) -> None:
        with self._starting:
            self._close()

    def slots(self, count: int, machines: Sequence[int] | None, devices: Sequence[int] | None) -> list[Slot]:
        local = list(range(self.ranks_per_machine) if devices is None else devices)
        if self._listener is None:  # what cannot be is refused before anything starts
            self._checked(count, machines, local, list(range(self.machines)))
        usable = self._checked(count, machines, local, sorted(self._opened().links))
        return [Slot(number, device) for number, device in self._places(usable, local)[:count]]

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        environ = shared_environment(self.environment)
        listener = self._opened()
        started: list[AgentRank] = []
        try:
            for number, slot in ranks:
                rank = self._link(slot.machine).start(number, next(self._rank_ids), environ)
                started.append(rank)
            deadline = time.monotonic() + CONNECT_S
            for rank in started:
                rank.connected.wait(max(0.0, deadline - time.monotonic()))
                _require_connected(rank, listener)
        except BaseException:
            end_ranks(started)
            raise
        return list(started)

    def cores(self, machine: int) -> int:
        return self._link(machine).info.cores

    def address_of(self, machine: int) -> str:
        return self._link(machine).info.address

    @property
    def found(self) -> list[MachineInfo]:
        """The machines that are there, in the order of their numbers."""
        links = sorted(self._opened().links.items())
        return [link.info for _, link in links if link.lost is None]

    @property
    def driver_address(self) -> str:
        """The address of this machine towards the others."""
        return self._opened().address

    @property
    def least(self) -> int:
        """The number of machines that will do."""
        return self.machines if self.fewest is None else self.fewest

    # --------------------------------------------------------------- plumbing

    def _checked(
        self, count: int, machines: Sequence[int] | None, devices: list[int], numbers: list[int]
    ) -> list[int]:
        """Return the machines for ``count`` ranks among ``numbers``; raises `ConfigError`."""
        usable = numbers if machines is None else list(machines)
        if set(usable) - set(numbers) or len(set(usable)) != len(usable):
            raise ConfigError(f"machines = {usable}: there are {numbers}; name each of them at most once")
        if len(set(devices)) != len(devices):
            raise ConfigError(f"devices = {devices}; name different devices, numbered on each machine")
        if len(usable) * len(devices) < count:
            raise ConfigError(
                f"a layout of {count} ranks, and machines {usable} have places for {len(usable) * len(devices)}, "
                f"{len(devices)} each; use a smaller layout, more machines, or more ranks on each machine"
            )
        return usable

    def _places(self, machines: Sequence[int], devices: Sequence[int]) -> list[tuple[int, int]]:
        """Machine and device of each rank that there is room for, in the order of their numbers."""
        return [(machine, device) for machine in machines for device in devices]

    def _opened(self) -> AgentListener:
        self.open()
        assert self._listener is not None
        return self._listener

    def _link(self, machine: int) -> AgentLink:
        link = self._opened().links[machine]
        if link.lost is not None:
            raise ClusterError(f"{link.info} {link.lost}. Start an agent on it again, or name other machines")
        return link

    def _require_files(self) -> None:
        """Raise `ConfigError` where this process may not open the connections of one group on all machines."""
        needed = FILES_PER_RANK * self.machines * self.ranks_per_machine + 2 * self.machines + SPARE_FILES
        if (files := most_open_files()) < needed:
            raise ConfigError(
                f"{self.machines} machines with {self.ranks_per_machine} ranks each need {needed} open files in the "
                f"driver, and its hard limit is {files}; raise it (ulimit -Hn {needed}, as root)"
            )

    def expect(self, machines: int) -> None:
        """No more than ``machines`` machines will come, which is at least ``fewest``."""
        assert self._listener is not None
        self._listener.expect(machines)

    def let_go(self) -> None:
        """Let the agents go that came, to wait for others."""
        assert self._listener is not None
        self._listener.let_go()

    def time_left(self) -> float:
        """Seconds until all machines have to be there."""
        return max(0.0, self._deadline - time.monotonic())

    def launch_in_time(self, driver: str, key: bytes) -> None:
        """As `_launch`, which may use the time that is left; agents get a little more to come."""
        self._launch(driver, key)
        self._deadline = max(self._deadline, time.monotonic() + min(AGENTS_S, self.wait_s))

    def _wait_for_agents(self, listener: AgentListener) -> None:
        while not listener.is_complete(LOOK_S):
            self._check_launched()
            if self.time_left():
                continue
            if len(listener.links) >= self.least:
                return
            raise ClusterError(
                f"{len(listener.links)} of {self.machines} machines came to {listener.endpoint} within "
                f"{self.wait_s:g} s{listener.account()}"
            )

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._end_launched()


def _require_connected(rank: AgentRank, listener: AgentListener) -> None:
    """Raise `GroupError` unless ``rank`` has a channel."""
    if rank.has_ended:
        raise GroupError(f"rank {rank.rank}{rank.place} {rank.exit_reason()} during the start")
    if not rank.connected.is_set():
        raise GroupError(
            f"rank {rank.rank}{rank.place} did not connect to {listener.endpoint} within {CONNECT_S:g} s; does a "
            "firewall let the agent in and not the ranks?"
        )
