"""`Server`: one server of a fleet, its process if this engine started it, and the calls that RL needs."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from core_rl.backend.meta import SyncMethod
from core_rl.errors import EngineContractError, RolloutError
from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.api import Api, Refused, ServerTimeout, Unreachable
from core_rl.servers.config import Interrupt
from core_rl.servers.facts import FRESH, NO_LIMITS, ServerFacts, label_of
from core_rl.servers.process import RunningServer
from core_rl.weight_sync.cuda import CudaEnvironment, DeviceMemory
from core_rl.weight_sync.messages import Bucket, GroupAddress

__all__ = [
    "PROBE_TIMEOUT_S",
    "SYNC_PROTOCOLS",
    "LoadsAdapters",
    "LoadsBroadcasts",
    "LoadsTensors",
    "ReleasesMemory",
    "Server",
    "require_protocols",
]

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

POLL_S = 0.25
PROBE_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 10.0


class Server(ABC):
    """A server, which may be unreachable for a while. Belongs to the event loop of its ``api``.

    Subclasses know the calls of one product, and implement the protocols below of its capabilities. All of them raise
    as `Api.post` does.
    """

    tested: ClassVar[frozenset[str]] = frozenset()
    """Versions of the product that its tests run; empty where any is fine."""
    health_path: ClassVar[str] = "/health"
    """``GET`` it has status 200 as soon as the server can compute."""

    def __init__(
        self,
        api: Api,
        update_timeout_s: float,
        start: Callable[[], RunningServer] | None = None,
        *,
        steered: bool = True,
    ) -> None:
        self.api = api
        self.address, self.name = api.address, api.name
        self.host = api.address.rpartition(":")[0].strip("[]")
        self.update_timeout_s = update_timeout_s
        self.start = start
        """Starts it again on the same port; None for a server started elsewhere."""
        self.process = None if start is None else start()
        self.steered = steered
        """Whether it may be paused, labelled and given weights; other servers only draw and score."""
        self.in_flight = 0
        self.ready = False
        self.version = -1
        """The version of the weights that it was given; negative before it is connected."""
        self.weights_intact = True
        """False from the beginning of a weight update until its success: the server must not compute."""
        self._pausing = asyncio.Lock()
        """Lock of pausing and continuing: the later call has the last effect."""
        self.ranks = 1
        """Tensor-parallel degree."""
        self.device = ""
        """Device type: ``cpu`` or ``cuda``."""
        self.limits = NO_LIMITS
        self.failure: BaseException | None = None
        """The error after which it will not come back."""
        self.recovery: asyncio.Task[None] | None = None
        self.adapter = ServedAdapter(0)
        """The adapter of new requests, or none."""

    @contextmanager
    def busy(self) -> Iterator[ServedAdapter]:
        """Count a request in flight, which uses the adapter that is yielded."""
        adapter = self.adapter
        self.in_flight += 1
        adapter.in_flight += 1
        try:
            yield adapter
        finally:
            self.in_flight -= 1
            adapter.in_flight -= 1

    def cuda(self) -> CudaEnvironment | None:
        """The CUDA environment of its ranks; None without CUDA, and for a server started elsewhere."""
        return None if self.process is None else self.process.cuda()

    def stop(self) -> None:
        """End its process, if this engine started it."""
        if self.process is not None:
            self.process.stop()

    async def wait_for_facts(self, timeout_s: float) -> ServerFacts:
        """The facts of the server as soon as it responds, without a change to it; raises as `wait_until_up` does."""
        return await self._poll(self.facts, timeout_s)

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server responds, and computes where its weights allow it; logs a warning every 10 s.

        Raises `RolloutError` with the end of its log if it ends, `ServerTimeout`, and `Refused` where waiting does not
        help.
        """
        await self._poll(self._probe, timeout_s)

    async def _poll(self, probe: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
        started = logged = time.monotonic()
        while True:
            self.require_alive()
            try:
                return await probe()
            except (Unreachable, ServerTimeout, Refused) as error:
                if isinstance(error, Refused) and error.is_final:
                    raise
                now = time.monotonic()
                if now - started > timeout_s:
                    log = "" if self.process is None else f"\n{self.process.log_tail()}"
                    raise ServerTimeout(
                        f"{self.name} is not ready after {timeout_s:g} s: {error}{log}"
                    ) from error
                if now - logged > PROGRESS_EVERY_S:
                    logged = now
                    logger.warning("waiting for %s: %.0f s (%s)", self.name, now - started, error)
            await asyncio.sleep(POLL_S)

    async def _probe(self) -> None:
        if not self.weights_intact:
            # A server that has started again has whole weights.
            self.weights_intact = (await self.facts()).label == FRESH
        if self.weights_intact:
            if self.steered:
                # A server that somebody paused may wait with its response.
                await self.continue_generation()
            await self.api.get(self.health_path, PROBE_TIMEOUT_S, parse=False)

    def require_alive(self) -> None:
        """Raise `RolloutError` with the end of its log if this engine started it and it has ended."""
        if self.process is not None:
            self.process.require_alive(self.name)

    async def has_ended(self) -> bool:
        """Whether its process, if this engine started it, has ended, or ends within a second."""
        for _ in range(20):  # its connections break before its process has ended
            if self.process is None or not self.process.alive:
                break
            await asyncio.sleep(0.05)
        return self.process is not None and not self.process.alive

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """``POST`` a step of a weight update, within the time limit of one; raises as `Api.post` does."""
        return await self.api.post(path, body, self.update_timeout_s)

    async def post_if_up(self, path: str, body: dict[str, Any]) -> None:
        """``POST`` the end of something that a server which cannot be reached has lost anyway."""
        try:
            await self.api.post(path, body, PROBE_TIMEOUT_S, parse=False)
        except RolloutError as error:
            logger.debug("%s %s had no effect: %s", path, body, error)

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop computing: requests in flight wait to ``continue``, or end as they are (``abort``)."""
        async with self._pausing:
            await self._pause(interrupt)

    async def continue_generation(self) -> None:
        """Compute again after `pause`: keys and values of requests in flight are computed anew.

        Ignored while its weights are not whole.
        """
        async with self._pausing:
            if self.weights_intact:
                await self._continue()

    async def set_weight_version(self, version: int) -> None:
        """Tokens from now on carry ``version``; requests in flight continue."""
        await self.set_label(label_of(version))
        self.version = version

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """The server's model and settings, by GET requests alone.

        Raises `RolloutError` for a server of another kind.
        """

    async def abort_all(self) -> None:
        """End all requests as they are, and stop computing; a server that cannot be reached has lost them."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._pause("abort")
        except (RolloutError, TimeoutError) as error:
            logger.debug("%s did not abort its requests: %s", self.name, error)

    @abstractmethod
    async def _pause(self, interrupt: Interrupt) -> None: ...

    @abstractmethod
    async def _continue(self) -> None: ...

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Tokens from now on carry ``label``; requests in flight continue."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Abort the request ``rid``; a server that cannot be reached has lost it."""

    @abstractmethod
    async def flush_cache(self) -> None:
        """Drop the keys and values of earlier weights."""

    @abstractmethod
    async def load_directory(self, path: str) -> None:
        """Load the weights in ``path``, and drop keys and values; the version stays."""


@runtime_checkable
class LoadsTensors(Protocol):
    """Loads weights in parts; for ``sync_tensor``."""

    async def begin_update(self) -> None:
        """Begin to load weights in parts."""

    async def end_update(self) -> None:
        """All parts are loaded, or no others will come."""

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        """Copy ``bucket`` into the weights, between the beginning and the end of an update.

        Its ranks read it in ``memory``, one for each, and without any in shared memory.
        """


@runtime_checkable
class LoadsBroadcasts(Protocol):
    """Loads weights from a process group; for ``sync_distributed``, with `LoadsTensors`."""

    async def join(self, group: GroupAddress, rank: int) -> None:
        """Have its ranks join ``group``, the first of them as ``rank``; returns when all members have joined."""

    async def load_broadcast(self, bucket: Bucket, group: str) -> None:
        """Copy the broadcasts of rank 0 of ``group`` into the weights: ``bucket``, tensor by tensor."""

    async def leave(self, group: str) -> None:
        """Leave ``group``: ranks that wait for this server get an error. An unreachable server has left."""


@runtime_checkable
class LoadsAdapters(Protocol):
    """Loads adapters over its weights; for ``sync_lora``."""

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        """Load ``adapter`` in addition to the loaded adapters."""

    async def unload_adapter(self, adapter: ServedAdapter) -> None:
        """Unload ``adapter``, which no request needs; a server that cannot do it has lost it before."""


@runtime_checkable
class ReleasesMemory(Protocol):
    """Frees its accelerators for a while; for ``release_memory``."""

    async def release_memory(self) -> None:
        """Free the memory of its accelerators."""

    async def resume_memory(self) -> None:
        """Allocate it again; the weights are loaded after it."""


SYNC_PROTOCOLS: Mapping[SyncMethod, tuple[type, ...]] = {
    "disk": (),
    "tensor": (LoadsTensors,),
    "distributed": (LoadsTensors, LoadsBroadcasts),
    "lora": (LoadsAdapters,),
}
"""The protocols that a server implements for a method of weight sync."""


def require_protocols(server: type[Server], protocols: Sequence[type]) -> None:
    """Raise `EngineContractError` unless the class ``server`` implements ``protocols``."""
    absent = [protocol.__name__ for protocol in protocols if not issubclass(server, protocol)]
    if absent:
        raise EngineContractError(
            f"{server.__module__}.{server.__qualname__} does not implement {', '.join(absent)} of "
            "core_rl.servers.server; add the methods, or leave the capability out of the engine's spec"
        )
