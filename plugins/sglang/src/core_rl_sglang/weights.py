"""Where servers take weights from. What was installed last is kept, so that a server that is replaced gets it too."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import check_source
from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.distributed.comm import Comm
from core_rl.errors import WeightsError
from core_rl.weight_sync.group import GroupAddress, Seats
from core_rl.weight_sync.messages import Bucket
from core_rl_sglang.directories import plain_name
from core_rl_sglang.server import Server

__all__ = ["DiskWeights", "TensorWeights", "Weights"]


class Weights(Protocol):
    """One version of the weights, which any number of servers can take, now and later."""

    version: int

    @property
    def origin(self) -> str:
        """The model path that a fresh server with them reports; empty if there is none."""
        ...

    async def load(self, server: Server, timeout_s: float) -> None:
        """Install them on ``server``, which is paused; raises the errors of its interface."""
        ...

    def discard(self) -> None:
        """Free what keeps them; no server will need them again."""
        ...


class DiskWeights:
    """A model directory that servers read themselves."""

    def __init__(self, directory: Path, version: int, *, temporary: bool = False) -> None:
        self.directory = directory
        self.version = version
        self._temporary = temporary
        self._name = plain_name(directory)

    @property
    def origin(self) -> str:
        return str(self._name.path)

    @staticmethod
    def checked(meta: WeightUpdateMeta, shapes: dict[str, tuple[int, ...]]) -> DiskWeights:
        """The weights in ``meta.path``, which must be whole and hold tensors of these names and ``shapes``.

        Its files are linked into a directory beside it: trainers put each version in place of the one before,
        also while servers still read that one.

        Raises `CheckpointError` and `WeightsError` before any server hears of them.
        """
        assert meta.path is not None
        with opened(meta.path, Comm(), kind="hf", require_manifest=meta.verify) as directory:
            check_source(TensorFiles(directory, "model"), shapes, f"the weights in {meta.path!r}")
            return DiskWeights(_linked(directory), meta.version, temporary=True)

    async def load(self, server: Server, timeout_s: float) -> None:
        body = {
            "model_path": self.origin,
            "weight_version": str(self.version),
            "flush_cache": True,
        }
        await server.control("/update_weights_from_disk", body, timeout_s)
        server.version = self.version

    def discard(self) -> None:
        self._name.remove()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _linked(directory: Path) -> Path:
    """A directory beside ``directory`` with its files; copies where the file system has no hard links."""
    copy = Path(tempfile.mkdtemp(prefix=f".{directory.name}.served-", dir=directory.parent))
    try:
        shutil.copytree(directory, copy, copy_function=_link, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


class TensorWeights:
    """Weights in buckets of shared memory, which come one after another while servers take them."""

    origin = ""

    def __init__(self, version: int) -> None:
        self.version = version
        self._buckets: list[Bucket] = []
        self._complete = False
        self._failure: WeightsError | None = None
        self._changed = asyncio.Condition()
        self._taken: dict[Server, int] = {}
        """How many buckets each server has that is in the middle of taking them."""

    def seats(self, servers: Sequence[Server]) -> Seats | None:
        """What the trainer's rank has to know of ``servers``, which join its group; None without one."""
        return None

    async def invite(self, group: GroupAddress, timeout_s: float) -> None:
        """Have the servers join ``group``."""

    async def dismiss(self) -> None:
        """Have servers leave that have no more use for the group."""

    async def add(self, bucket: Bucket, *, broadcast: bool = False) -> None:
        """Offer a bucket; returns when no server is more than this one behind."""
        async with self._changed:
            self._buckets.append(bucket)
            self._changed.notify_all()
            behind = len(self._buckets) - 1
            await self._changed.wait_for(lambda: all(count >= behind for count in self._taken.values()))

    async def finish(self, failure: WeightsError | None = None) -> None:
        """There are no more; with ``failure``, servers that have taken some must not serve them."""
        async with self._changed:
            self._complete, self._failure = True, failure
            self._changed.notify_all()

    async def load(self, server: Server, timeout_s: float) -> None:
        await self._pass_on(server, lambda bucket: server.take_tensors(bucket, timeout_s), timeout_s)

    async def _pass_on(
        self, server: Server, take: Callable[[Bucket], Awaitable[None]], timeout_s: float
    ) -> None:
        """Have ``server`` take all buckets, from the first on, as they come."""
        await server.control("/begin_weight_update", {}, timeout_s)
        self._taken[server] = 0
        try:
            while (bucket := await self._next(server)) is not None:
                await take(bucket)
                async with self._changed:
                    self._taken[server] += 1
                    self._changed.notify_all()
        finally:
            async with self._changed:
                del self._taken[server]
                self._changed.notify_all()
            await server.control("/end_weight_update", {}, timeout_s)
        await server.flush_cache(timeout_s)

    async def _next(self, server: Server) -> Bucket | None:
        count = self._taken[server]
        async with self._changed:
            await self._changed.wait_for(lambda: self._complete or len(self._buckets) > count)
        if self._failure is not None:
            raise self._failure
        return self._buckets[count] if len(self._buckets) > count else None

    def discard(self) -> None:
        self._buckets.clear()
