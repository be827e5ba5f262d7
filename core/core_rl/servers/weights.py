"""Weights that servers load. Those installed last are kept, so that a server that is replaced gets them too."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self, TypeAlias, cast

import torch

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import check_source
from core_rl.checkpoint.directory import open_update
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.distributed.process_group import listen_on
from core_rl.errors import WeightsError
from core_rl.servers.adapters import ServedDirectory
from core_rl.servers.api import Refused, ServerTimeout
from core_rl.servers.pool import failures
from core_rl.servers.server import LoadsBroadcasts, LoadsTensors, Server
from core_rl.weight_sync.cuda import CudaEnvironment, DeviceMemory
from core_rl.weight_sync.distributed import RendezvousServer, WeightGroup, address_towards
from core_rl.weight_sync.messages import Bucket, GroupAddress, ReceiverRanks

logger = logging.getLogger(__name__)


class DiskWeights:
    """A model directory that servers read themselves."""

    def __init__(self, directory: Path, version: int, *, temporary: bool = False) -> None:
        self._directory = ServedDirectory(directory, temporary=temporary)
        self.version = version
        self.origin = self._directory.name
        """The model path that a fresh server with these weights reports."""

    @staticmethod
    def checked(meta: WeightUpdateMeta, shapes: dict[str, tuple[int, ...]]) -> DiskWeights:
        """The weights in ``meta.path``, which must be whole and hold tensors of these names and ``shapes``.

        Its files are linked into a temporary directory: trainers replace each version by the next one, also while
        servers still read it.

        Raises `CheckpointError` and `WeightsError` before any server is called.
        """
        with open_update(meta) as directory:
            check_source(TensorFiles(directory, "model"), shapes, f"the weights in {meta.path!r}")
            # With hard links; copies where the file system has none.
            copy = Path(tempfile.mkdtemp(prefix=f".{directory.name}.served-", dir=directory.parent))
            try:
                shutil.copytree(directory, copy, copy_function=_link, dirs_exist_ok=True)
            except BaseException:
                shutil.rmtree(copy, ignore_errors=True)
                raise
            return DiskWeights(copy, meta.version, temporary=True)

    async def load(self, server: Server) -> None:
        """Load them on ``server``, which is paused; raises the errors of its interface."""
        await server.load_directory(self.origin)

    def discard(self) -> None:
        """Remove the files; no server will need them again."""
        self._directory.discard()


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


class TensorWeights:
    """Weights in buckets of shared memory, which arrive while servers load them."""

    origin = ""
    """No model path has these weights."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._buckets: list[Bucket] = []
        self._device_memory: list[Sequence[DeviceMemory]] = []
        """Each bucket on the trainer's GPU, for each rank of the update's servers; empty where they cannot open it."""
        self._first_rank: dict[Server, int] = {}
        """Servers that have not begun to load, with the number of their first rank."""
        self._complete = False
        self._failure: WeightsError | None = None
        self._changed = asyncio.Condition()
        self._loaded: dict[Server, int] = {}
        """Buckets that each server has loaded, for servers that have not loaded all."""

    @classmethod
    def arrived(cls, version: int, buckets: Sequence[Bucket]) -> Self:
        """Weights whose ``buckets`` are all in the shared memory of this process."""
        weights = cls(version)
        weights._buckets, weights._complete = list(buckets), True
        return weights

    def receiver_ranks(self, servers: Sequence[Server]) -> ReceiverRanks | None:
        """The ranks of ``servers``, which get what only they can read; None where there are none."""
        if not servers:
            return None
        require_shared_memory_with(servers)
        self._first_rank = first_ranks(servers, 0)
        return ReceiverRanks(count=sum(server.ranks for server in servers), cuda=environments(servers))

    async def join(self, group: GroupAddress) -> None:
        """Have the servers join ``group``."""

    async def leave(self) -> None:
        """End the update for servers: from now on they load from shared memory."""
        self._first_rank.clear()
        self._device_memory.clear()

    async def add(
        self, bucket: Bucket, memory: Sequence[DeviceMemory] = (), *, broadcast: bool = False
    ) -> None:
        """Add a bucket; returns when all servers have loaded those before it."""
        async with self._changed:
            self._buckets.append(bucket)
            self._device_memory.append(memory)
            self._changed.notify_all()
            behind = len(self._buckets) - 1
            await self._changed.wait_for(lambda: all(count >= behind for count in self._loaded.values()))

    async def finish(self, failure: WeightsError | None = None) -> None:
        """Add no more buckets; with ``failure``, `load` raises it."""
        async with self._changed:
            self._complete, self._failure = True, failure
            self._changed.notify_all()

    async def load(self, server: Server) -> None:
        """Load all buckets on ``server``, which is paused; raises the errors of its interface."""
        first = self._first_rank.pop(server, None)
        if first is None:
            await self.load_each(server, cast("LoadsTensors", server).load_tensors)
            return
        ranks = slice(first, first + server.ranks)

        async def load(bucket: Bucket) -> None:
            await cast("LoadsTensors", server).load_tensors(
                bucket, self._device_memory[self._loaded[server]][ranks]
            )

        await self.load_each(server, load)

    async def load_each(self, server: Server, load: Callable[[Bucket], Awaitable[None]]) -> None:
        """Have ``server`` load all buckets, from the first on, as they arrive."""
        loading = cast("LoadsTensors", server)
        await loading.begin_update()
        self._loaded[server] = 0
        try:
            while (bucket := await self._next(server)) is not None:
                await load(bucket)
                async with self._changed:
                    self._loaded[server] += 1
                    self._changed.notify_all()
        finally:
            async with self._changed:
                del self._loaded[server]
                self._changed.notify_all()
            await loading.end_update()
        await server.flush_cache()

    async def _next(self, server: Server) -> Bucket | None:
        count = self._loaded[server]
        async with self._changed:
            await self._changed.wait_for(lambda: self._complete or len(self._buckets) > count)
        if self._failure is not None:
            raise self._failure
        return self._buckets[count] if len(self._buckets) > count else None

    def discard(self) -> None:
        """Free the memory; no server will need them again."""
        self._buckets.clear()


def first_ranks(servers: Sequence[Server], start: int) -> dict[Server, int]:
    """The number of each server's first rank, counted over all servers from ``start`` on."""
    numbers = accumulate((server.ranks for server in servers), initial=start)
    return dict(zip(servers, numbers, strict=False))


def environments(servers: Sequence[Server]) -> tuple[CudaEnvironment, ...]:
    """CUDA environments of ``servers``, as far as they are known."""
    return tuple(cuda for server in servers if (cuda := server.cuda()) is not None)


def require_shared_memory_with(servers: Sequence[Server]) -> None:
    """Raise `WeightsError` for servers on other machines, which cannot read buckets in shared memory."""
    elsewhere = [server.address for server in servers if not _is_here(server.host)]
    if elsewhere:
        raise WeightsError(
            f"sync by 'tensor' goes through the memory of one machine, and the servers {', '.join(elsewhere)} are "
            "on others; sync by 'distributed' or 'disk'"
        )


def _is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine."""
    try:
        listen_on(host).close()
    except OSError:
        return False
    return True


Weights: TypeAlias = DiskWeights | TensorWeights
"""One version of the weights, which any number of servers can load, now and later."""


class BroadcastWeights(TensorWeights):
    """Buckets that the trainer's rank broadcasts to servers; this process keeps a copy.

    Lost servers, and servers whose group broke, get them from this process, in a group of their own: it may be
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
