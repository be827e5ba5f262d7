"""`LocalHosts`: ranks that are children of the driver, on its own machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from core_rl.distributed.channel import Buffer, Channel
from core_rl.errors import ConfigError, GroupError
from core_rl.launch.hosts import Kept, Rank, Slot, end_ranks
from core_rl.launch.kept import KeptMessage
from core_rl.launch.process import RankProcess
from core_rl.machine import cpu_cores

__all__ = ["LocalHosts", "LocalRank"]

LOOPBACK = "127.0.0.1"
"""Meeting address of the ranks of one machine, out of reach from others."""


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

    def keep(self, parts: Sequence[Buffer], deadline: float) -> Kept:
        return KeptMessage.of(parts)

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
