"""`ServerPool`: the servers that are ready, the choice of one for a prompt, and the recovery of lost ones."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate

from core_rl.errors import RolloutError
from core_rl.servers.api import Hung, Unreachable
from core_rl.servers.config import ServerOptions
from core_rl.servers.server import Server

logger = logging.getLogger(__name__)

BLOCK = 16
"""Prefixes are remembered at multiples of so many tokens."""
REMEMBERED = 100_000
"""Limit of remembered prefixes; the least recently used are forgotten."""
SLACK = 16
"""Additional requests of a server over the idlest server before it loses a known prompt."""


Failures = dict[Server, BaseException]
"""The error of each server on which a call failed."""


async def failures(call: Callable[[Server], Awaitable[None]], servers: Sequence[Server]) -> Failures:
    """Run ``call`` on all ``servers``; returns its errors."""
    errors = await asyncio.gather(*map(call, servers), return_exceptions=True)
    return {server: error for server, error in zip(servers, errors, strict=True) if error is not None}


class ServerPool:
    """The servers of a fleet. All methods run on one event loop.

    ``restore`` waits for a lost server, gives it the present weights, and calls `add`.
    """

    def __init__(
        self, options: ServerOptions, servers: Sequence[Server], restore: Callable[[Server], Awaitable[None]]
    ) -> None:
        self.options = options
        self.servers = tuple(servers)
        self.closing = False
        self._restore = restore
        self._router = PrefixRouter()
        self._changed = asyncio.Condition()
        """Notified when a server comes back, or never will."""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[Server]:
        """The servers that get requests."""
        return [server for server in self.servers if server.ready]

    async def add(self, server: Server) -> None:
        """Let ``server`` get requests."""
        async with self._changed:
            server.ready, server.failure = True, None
            self._changed.notify_all()

    async def pick(self, ids: Sequence[int]) -> Server:
        """The server for a prompt, as soon as one is ready; `RolloutError` when none is left."""
        none_of = (
            f"none of the {self.servers[0].api.product} servers "
            f"{', '.join(server.address for server in self.servers)}"
        )
        try:
            async with asyncio.timeout(self.options.start_timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self.ready or all(server.failure is not None for server in self.servers)
                )
        except TimeoutError as error:
            raise RolloutError(f"{none_of} came back") from error
        by_name = {server.address: server for server in self.ready}
        if not by_name:
            failure = self.servers[0].failure
            raise RolloutError(f"{none_of} is left: {failure}") from failure
        return by_name[self._router.pick(ids, {name: server.in_flight for name, server in by_name.items()})]

    def abort(self, server: Server, rid: str) -> None:
        """Abort a request on ``server``, in the background."""
        if not self.closing:
            task = asyncio.ensure_future(server.abort(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def post(self, call: Callable[[Server], Awaitable[None]]) -> None:
        """Call all ready servers; unreachable servers are lost, and restored when they are back."""

        async def one(server: Server) -> None:
            try:
                await call(server)
            except Unreachable as error:
                self.mark_lost(server, error)

        await asyncio.gather(*map(one, self.ready))

    # -------------------------------------------------------------- recovery

    def mark_lost(self, server: Server, error: BaseException) -> None:
        """Start the recovery of ``server``; it gets no requests until then."""
        if server.ready and not self.closing:
            logger.warning("lost %s: %s", server.name, error)
            server.ready = False
            self._router.forget(server.address)
            server.recovery = asyncio.ensure_future(self._recover(server, error))

    def mark_failed(self, failed: Failures) -> None:
        """Mark all servers that have ``failed`` as lost."""
        for server, error in failed.items():
            self.mark_lost(server, error)

    async def wait_recovered(self) -> None:
        """Wait for the recoveries that are under way."""
        running = [s.recovery for s in self.servers if s.recovery is not None and not s.recovery.done()]
        await asyncio.gather(*running)

    def close(self) -> None:
        """End recoveries, and start no others."""
        self.closing = True
        for server in self.servers:
            if server.recovery is not None:
                server.recovery.cancel()

    async def _recover(self, server: Server, loss: BaseException) -> None:
        try:
            await self._revive(server, hangs=isinstance(loss, Hung))
            await self._restore(server)
            logger.warning("%s is back with weights of version %d", server.name, server.version)
        except Exception as error:  # noqa: BLE001  (the task's boundary: requests raise it)
            logger.error("%s does not come back: %s", server.name, error)
            if not server.weights_intact:
                # Its requests would wait for ever; the tokens that they have are of whole weights.
                await server.abort_all()
            async with self._changed:
                server.failure = error
                self._changed.notify_all()

    async def _revive(self, server: Server, *, hangs: bool) -> None:
        """Restart a process that has ended, or hangs."""
        if server.start is None or server.process is None or not (hangs or await server.has_ended()):
            return
        try:
            server.require_alive()
        except RolloutError as ended:
            if not self.options.restart:
                raise
            logger.warning("%s\nit is started again", ended)
        if self.options.restart:
            await asyncio.to_thread(server.process.stop)
            server.process = await asyncio.to_thread(server.start)


class PrefixRouter:
    """Sends a prompt to the server that has seen its longest prefix, unless that one has much more to do than others.

    So the samples of a group, and the turns of a conversation, find the keys and values of their prefix in a cache.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, str] = OrderedDict()
        """The last server for each prefix, by its hash."""

    def pick(self, ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """The name of a server in ``loads``, the requests in flight of each server."""
        blocks = (ids[start : start + BLOCK] for start in range(0, len(ids), BLOCK))
        prefixes = list(accumulate(blocks, lambda before, block: hash((before, *block)), initial=0))[1:]
        idlest = min(loads, key=lambda name: loads[name])
        known = next((self._seen[key] for key in reversed(prefixes) if self._seen.get(key) in loads), idlest)
        server = known if loads[known] <= loads[idlest] + SLACK else idlest
        for key in prefixes:
            self._seen[key] = server
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return server

    def forget(self, name: str) -> None:
        """The caches of the server ``name`` are empty."""
        self._seen = OrderedDict((key, owner) for key, owner in self._seen.items() if owner != name)
