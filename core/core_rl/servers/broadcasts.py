"""Weights that servers receive in a process group, from the trainer's rank or, later, from this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import cast

import torch

from core_rl.servers.api import Refused, ServerTimeout
from core_rl.servers.pool import failures
from core_rl.servers.server import LoadsBroadcasts, Server
from core_rl.servers.weights import TensorWeights, environments, first_ranks
from core_rl.weight_sync.cuda import DeviceMemory
from core_rl.weight_sync.distributed import RendezvousServer, WeightGroup, address_towards
from core_rl.weight_sync.messages import Bucket, GroupAddress, ReceiverRanks

__all__ = ["BroadcastWeights"]

logger = logging.getLogger(__name__)


class BroadcastWeights(TensorWeights):
    """Buckets that the trainer's rank broadcasts to servers; this process keeps a copy.

    A server that was lost, and one whose group broke, gets them from this process, in a group of their own: it may be
    on another machine.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self._receivers: tuple[Server, ...] = ()
        self._group = ""
        self._members: set[Server] = set()
        self._by_memory = 0
        """The number of last buckets that are not broadcast, since the group broke."""

    def receiver_ranks(self, servers: Sequence[Server]) -> ReceiverRanks | None:
        self._receivers = tuple(servers)
        return ranks_of(servers) if servers else None

    async def join(self, group: GroupAddress) -> None:
        self._group = group.name
        rank_of = first_ranks(self._receivers, 1)
        failed = await failures(lambda server: _member(server).join(group, rank_of[server]), self._receivers)
        for server, error in failed.items():
            logger.warning("%s did not join: %s", server.name, error)
        self._members = set(self._receivers) - failed.keys()

    async def leave(self) -> None:
        members, self._members = self._members, set()
        await asyncio.gather(*(_member(server).leave(self._group) for server in members))

    async def add(
        self, bucket: Bucket, memory: Sequence[DeviceMemory] = (), *, broadcast: bool = False
    ) -> None:
        self._by_memory += not broadcast
        await super().add(bucket, memory)

    async def load(self, server: Server) -> None:
        if server in self._members:
            self._members.discard(server)
            try:
                await self.load_each(server, lambda bucket: self._load(server, bucket))
                return
            except (Refused, ServerTimeout) as error:
                logger.warning("sending weight version %d again: %s", self.version, error)
            finally:
                await _member(server).leave(self._group)
        await self._send(server)

    async def _load(self, server: Server, bucket: Bucket) -> None:
        if self._by_memory:
            raise Refused(f"{server.name}: the group of the weight update broke")
        await _member(server).load_broadcast(bucket, self._group)

    async def _send(self, server: Server) -> None:
        """Broadcast the kept buckets, in a group with ``server`` alone."""
        member = _member(server)
        rendezvous = RendezvousServer(ranks_of([server]), torch.device("cpu"))
        address = rendezvous.address
        group, _ = await asyncio.gather(asyncio.to_thread(rendezvous.wait), member.join(address, 1))

        async def load(bucket: Bucket) -> None:
            sending = asyncio.to_thread(_broadcast, group, bucket)
            await asyncio.gather(member.load_broadcast(bucket, address.name), sending)

        try:
            await self.load_each(server, load)
        finally:
            await member.leave(address.name)
            group.close()


def ranks_of(servers: Sequence[Server]) -> ReceiverRanks:
    """The ranks of ``servers``, and the address of one server: a loopback only where all of them have such."""
    hosts = {server.host for server in servers}
    return ReceiverRanks(
        count=sum(server.ranks for server in servers),
        host=min(hosts, key=lambda host: (address_towards(host).startswith("127."), host)),
        on_cpu=all(server.device == "cpu" for server in servers),
        cuda=environments(servers),
    )


def _member(server: Server) -> LoadsBroadcasts:
    return cast("LoadsBroadcasts", server)


def _broadcast(group: WeightGroup, bucket: Bucket) -> None:
    for _, tensor in bucket:
        group.broadcast(tensor)
