"""Weights that servers take from a process group, whether the trainer's rank is in it or, later, this process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

import torch

from core_rl.weight_sync.group import GroupAddress, Invitation, Seats, WeightGroup
from core_rl.weight_sync.messages import Bucket
from core_rl_sglang.api import Refused, ServerTimeout
from core_rl_sglang.server import Server
from core_rl_sglang.weights import TensorWeights

__all__ = ["BroadcastWeights"]

logger = logging.getLogger(__name__)


class BroadcastWeights(TensorWeights):
    """Buckets that the trainer's rank broadcasts to servers, and that are kept here too.

    A server that was lost, and one whose group broke, gets them from this process, in a group for it alone: it may be
    on another machine.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self._invited: tuple[Server, ...] = ()
        self._group = ""
        self._members: set[Server] = set()
        self._by_memory = 0
        """How many buckets at the end are not broadcast, since the group broke."""

    def seats(self, servers: Sequence[Server]) -> Seats | None:
        self._invited = tuple(servers)
        if not self._invited:
            return None
        return Seats(count=sum(server.ranks for server in self._invited), host=_own_address(self._invited))

    async def invite(self, group: GroupAddress, timeout_s: float) -> None:
        self._group = group.name
        first, joins = 1, []
        for server in self._invited:
            joins.append(server.join(group, first, timeout_s))
            first += server.ranks
        results = await asyncio.gather(*joins, return_exceptions=True)
        for server, error in zip(self._invited, results, strict=True):
            if error is None:
                self._members.add(server)
            else:
                logger.warning("SGLang server %s did not join: %s", server.address, error)

    async def dismiss(self) -> None:
        members, self._members = self._members, set()
        await asyncio.gather(*(server.leave(self._group) for server in members))

    async def add(self, bucket: Bucket, *, broadcast: bool = False) -> None:
        self._by_memory += not broadcast
        await super().add(bucket)

    async def load(self, server: Server, timeout_s: float) -> None:
        if server in self._members:
            self._members.discard(server)
            try:
                await self._pass_on(server, lambda bucket: self._take(server, bucket, timeout_s), timeout_s)
                return
            except (Refused, ServerTimeout) as error:
                logger.warning("the weights are sent again: %s", error)
            finally:
                await server.leave(self._group)
        await self._send(server, timeout_s)

    async def _take(self, server: Server, bucket: Bucket, timeout_s: float) -> None:
        if self._by_memory:
            raise Refused(f"SGLang server {server.address}: the group of the weight update broke")
        await server.take_broadcast(bucket, self._group, timeout_s)

    async def _send(self, server: Server, timeout_s: float) -> None:
        """Broadcast what is kept here, in a group with ``server`` alone."""
        seats = Seats(count=server.ranks, host=_own_address([server]))
        invitation = Invitation(seats, torch.device("cpu"))
        address = invitation.address
        group, _ = await asyncio.gather(
            asyncio.to_thread(invitation.wait), server.join(address, 1, timeout_s)
        )

        async def take(bucket: Bucket) -> None:
            sending = asyncio.to_thread(_broadcast, group, bucket)
            await asyncio.gather(server.take_broadcast(bucket, address.name, timeout_s), sending)

        try:
            await self._pass_on(server, take, timeout_s)
        finally:
            await server.leave(address.name)
            group.close()


def _broadcast(group: WeightGroup, bucket: Bucket) -> None:
    for _, tensor in bucket:
        group.broadcast(tensor)


def _own_address(servers: Sequence[Server]) -> str:
    """This machine as ``servers`` reach it: the loopback only where all of them are here."""
    found = {_address_towards(server.address.rpartition(":")[0]) for server in servers}
    return min(found, key=lambda address: (address.startswith("127."), address))


def _address_towards(host: str) -> str:
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent
        found: str = probe.getsockname()[0]
        return found
