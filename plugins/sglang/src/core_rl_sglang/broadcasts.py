"""Weights that servers receive in a process group, from the trainer's rank or, later, from this process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from itertools import accumulate

import torch

from core_rl.weight_sync.group import GroupAddress, ReceiverRanks, RendezvousServer, WeightGroup
from core_rl.weight_sync.messages import Bucket
from core_rl_sglang.api import Refused, ServerTimeout
from core_rl_sglang.pool import failures
from core_rl_sglang.server import Server
from core_rl_sglang.weights import TensorWeights

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
        if not self._receivers:
            return None
        return _ranks(self._receivers)

    async def join(self, group: GroupAddress) -> None:
        self._group = group.name
        first = accumulate((server.ranks for server in self._receivers), initial=1)
        rank_of = dict(zip(self._receivers, first, strict=False))
        failed = await failures(lambda server: server.join(group, rank_of[server]), self._receivers)
        for server, error in failed.items():
            logger.warning("SGLang server %s did not join: %s", server.address, error)
        self._members = set(self._receivers) - failed.keys()

    async def leave(self) -> None:
        members, self._members = self._members, set()
        await asyncio.gather(*(server.leave(self._group) for server in members))

    async def add(self, bucket: Bucket, *, broadcast: bool = False) -> None:
        self._by_memory += not broadcast
        await super().add(bucket)

    async def load(self, server: Server) -> None:
        if server in self._members:
            self._members.discard(server)
            try:
                await self.load_each(server, lambda bucket: self._load(server, bucket))
                return
            except (Refused, ServerTimeout) as error:
                logger.warning("sending weight version %d again: %s", self.version, error)
            finally:
                await server.leave(self._group)
        await self._send(server)

    async def _load(self, server: Server, bucket: Bucket) -> None:
        if self._by_memory:
            raise Refused(f"SGLang server {server.address}: the group of the weight update broke")
        await server.load_broadcast(bucket, self._group)

    async def _send(self, server: Server) -> None:
        """Broadcast the kept buckets, in a group with ``server`` alone."""
        rendezvous = RendezvousServer(_ranks([server]), torch.device("cpu"))
        address = rendezvous.address
        group, _ = await asyncio.gather(asyncio.to_thread(rendezvous.wait), server.join(address, 1))

        async def load(bucket: Bucket) -> None:
            sending = asyncio.to_thread(_broadcast, group, bucket)
            await asyncio.gather(server.load_broadcast(bucket, address.name), sending)

        try:
            await self.load_each(server, load)
        finally:
            await server.leave(address.name)
            group.close()


def _broadcast(group: WeightGroup, bucket: Bucket) -> None:
    for _, tensor in bucket:
        group.broadcast(tensor)


def _ranks(servers: Sequence[Server]) -> ReceiverRanks:
    """The ranks of ``servers``, and this machine's address: the loopback only where all of them are on it."""
    found = {_address_towards(server.address.rpartition(":")[0]) for server in servers}
    host = min(found, key=lambda address: (address.startswith("127."), address))
    environments = [server.cuda() for server in servers]
    return ReceiverRanks(
        count=sum(server.ranks for server in servers),
        host=host,
        on_cpu=all(server.device == "cpu" for server in servers),
        cuda=tuple(found for found in environments if found is not None),
    )


def _address_towards(host: str) -> str:
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent
        found: str = probe.getsockname()[0]
        return found
