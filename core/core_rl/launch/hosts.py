"""`Hosts`: where the ranks of groups run, and `Rank`: the driver's view of a rank. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

from core_rl.distributed.channel import Buffer, Channel
from core_rl.errors import ConfigError, GroupError, MissingPackage
from core_rl.launch.kept import KeptMessage, Reference
from core_rl.launch.process import RankProcess
from core_rl.machine import cpu_cores
from core_rl.registry.objects import declared_in, load_entry_point

GROUP = "rl_hosts"
"""The entry-point group in which a distribution declares classes of `Hosts` by name."""
EXIT_WAIT_S = 5.0
"""Seconds for ranks to end."""
LOOPBACK = "127.0.0.1"
"""Meeting address of the ranks of one machine, out of reach from others."""


class Slot(NamedTuple):
    """Machine and device of one rank, by their numbers."""

    machine: int
    device: int


SharedMessage: TypeAlias = tuple[Reference, Callable[[], None]]
"""A message in a machine's memory: the reference that each rank gets instead, and a function that frees the memory."""


class Rank(Protocol):
    """The process of one rank, and the channel to it."""

    rank: int
    channel: Channel

    @property
    def machine(self) -> int:
        """The number of its machine."""

    @property
    def place(self) -> str:
        """A phrase about its machine, such as `` on node1 (machine 1)``; empty on the driver's own."""

    @property
    def pid(self) -> int:
        """The process id on its machine."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended, or is out of reach."""

    def exit_reason(self) -> str:
        """A phrase about the end of the process."""

    def stacks(self, ask: bool = False) -> str:
        """Return the stacks of the rank's threads at a crash, or with ``ask`` at this moment."""

    def wait(self, timeout_s: float) -> None:
        """Return when the process has ended or is out of reach, or after ``timeout_s`` seconds."""

    def kill(self) -> None:
        """Kill the process and its children. Does not wait; does nothing after `release`."""

    def release(self) -> None:
        """Free the resources of a process that has ended."""

    def keep(self, parts: Sequence[Buffer], deadline: float) -> SharedMessage:
        """Send a message to the machine once, for several ranks that are there; raises ``OSError``.

        ``deadline`` is a time of `time.monotonic`.
        """


class Hosts(Protocol):
    """One machine or several, on which groups start their ranks. Several groups may use one object."""

    @property
    def driver_address(self) -> str | None:
        """The address of the driver towards the machines; None where there is no machine but its own."""

    def open(self) -> None:
        """Wait for all machines, as their first use does; raises `ClusterError`. Further calls do nothing."""

    def slots(self, count: int, machines: Sequence[int] | None, devices: Sequence[int] | None) -> list[Slot]:
        """Places for ``count`` ranks: they fill one machine after the other.

        ``machines`` may be used, in order, by default all; ``devices`` are numbered on each
        machine. Raises `ConfigError` for a machine that does not exist, and for too few places.
        """

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        """Start ranks of these numbers, each of which then sends its hello. Raises `GroupError`."""

    def cores(self, machine: int) -> int:
        """CPU cores of the machine, for all ranks on it."""

    def address_of(self, machine: int) -> str:
        """The address under which the ranks of all machines reach this one."""

    def close(self) -> None:
        """End all processes on the machines. Further calls do nothing."""


def load_hosts(name: str) -> Callable[..., Hosts]:
    """Class of hosts that a distribution declares as ``name`` in `GROUP`; raises `ConfigError` where there is none."""
    points = [point for point in declared_in(GROUP) if point.error is None]
    if not (claims := [point for point in points if point.name == name]):
        known = ", ".join(sorted({point.name for point in points})) or "none"
        raise MissingPackage(
            f"no installed distribution has hosts named {name!r} (installed: {known}); run: "
            "pip install 'core-rl[cluster]'"
        )
    return cast("Callable[..., Hosts]", load_entry_point("hosts", claims, ConfigError))


def end_ranks(ranks: Sequence[Rank]) -> None:
    """Kill ``ranks``, wait until they have ended, `EXIT_WAIT_S` at most, and release them."""
    for rank in ranks:
        rank.kill()
    deadline = time.monotonic() + EXIT_WAIT_S
    for rank in ranks:
        rank.wait(max(0.0, deadline - time.monotonic()))
        rank.release()


class LocalRank(RankProcess):
    """A child of the driver."""

    machine, place = 0, ""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            super().__init__(rank, theirs, os.environ)
        except GroupError:
            self.channel.close()
            raise

    def keep(self, parts: Sequence[Buffer], deadline: float) -> SharedMessage:
        message = KeptMessage.of(parts)
        return message.reference, message.close

    def release(self) -> None:
        self.channel.close()
        super().release()


class LocalHosts:
    """The driver's own machine, which has the number 0."""

    driver_address = None

    def open(self) -> None:
        """Do nothing: the machine is there."""

    def slots(self, count: int, machines: Sequence[int] | None, devices: Sequence[int] | None) -> list[Slot]:
        if machines is not None and list(machines) != [0]:
            raise ConfigError(
                f"machines = {list(machines)}: there is one machine, 0; name it, or give the group hosts on several "
                "machines"
            )
        if devices is not None and len(set(devices)) != count:
            raise ConfigError(
                f"devices = {list(devices)} for {count} ranks; name a different one for each rank"
            )
        return [Slot(0, device) for device in (range(count) if devices is None else devices)]

    def cores(self, machine: int) -> int:
        return cpu_cores()

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        started: list[Rank] = []
        try:
            for number, _ in ranks:
                started.append(LocalRank(number))
        except BaseException:
            end_ranks(started)
            raise
        return started

    def address_of(self, machine: int) -> str:
        return LOOPBACK

    def close(self) -> None:
        """Nothing is left: the processes belong to groups."""
