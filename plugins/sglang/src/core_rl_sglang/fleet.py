"""Several servers as one: requests are spread, lost servers come back, and all of them have the same weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from core_rl.errors import RolloutError, WeightsError
from core_rl_sglang.adapters import Policy
from core_rl_sglang.api import Api, Refused, ServerTimeout, Unreachable
from core_rl_sglang.config import SglangOptions
from core_rl_sglang.router import PrefixRouter
from core_rl_sglang.server import PROBE_TIMEOUT_S, Server
from core_rl_sglang.weights import Weights

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

FRESH = "default"
"""The version label of a server that was given no weights since it started."""


class Fleet:
    """The servers of one engine. All methods run on one event loop."""

    def __init__(
        self, options: SglangOptions, servers: Sequence[Server], session: aiohttp.ClientSession
    ) -> None:
        self.options = options
        self.servers = list(servers)
        self._session = session
        self._router = PrefixRouter()
        self._changed = asyncio.Condition()
        """Notified when a server comes back, or never will."""
        self._weights_lock = asyncio.Lock()
        self._weights: Weights | None = None
        self._policy = Policy(0)
        """What servers answer with: their weights, or an adapter over them."""
        self._replaced: list[Policy] = []
        """Adapters that requests in flight may still need."""
        self._paused = False
        self.closing = False
        self._aborts: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ life cycle

    async def connect(self, weights: Weights) -> None:
        """Wait for all servers and have them serve ``weights``."""
        self._weights = weights
        await asyncio.gather(*(self._connect(server, weights) for server in self.servers))

    async def _connect(self, server: Server, weights: Weights) -> None:
        await server.wait_until_up(self.options.start_timeout_s)
        await self._bring_up_to_date(server, weights)
        await self._announce(server)

    async def _bring_up_to_date(self, server: Server, weights: Weights) -> None:
        path, label = await server.served()
        policy = self._policy
        # Only a fresh server is known to serve what its path says.
        if label != FRESH or path != weights.origin:
            await server.pause("retract", self.options.update_timeout_s)
            await weights.load(server, self.options.update_timeout_s)
            await server.go_on(PROBE_TIMEOUT_S)
        if policy.name is not None:
            await server.load_adapter(policy, self.options.update_timeout_s)
        server.policy = policy
        await server.label(self._version)
        if self._paused:
            await server.pause("retract", self.options.update_timeout_s)

    async def _announce(self, server: Server) -> None:
        async with self._changed:
            server.ready, server.failure = True, None
            self._changed.notify_all()
        if not self._paused:  # any more: whoever resumed meanwhile did not count this server
            await self._order(server, server.go_on(PROBE_TIMEOUT_S))

    async def close(self) -> None:
        """Give up what is in flight and free the connections; processes are not stopped here."""
        self.closing = True
        for server in self.servers:
            if server.recovery is not None:
                server.recovery.cancel()
        policies = [*self._replaced, self._policy]
        # A server unloads no adapter that a request still needs.
        await self._forget([policy for policy in policies if not policy.in_flight.total()])
        await self._session.close()
        for policy in policies:
            policy.discard()
        if self._weights is not None:
            self._weights.discard()

    # -------------------------------------------------------------- requests

    async def pick(self, ids: Sequence[int]) -> Server:
        """The server for a prompt, when one is there; `RolloutError` when none is left."""
        try:
            async with asyncio.timeout(self.options.start_timeout_s), self._changed:
                await self._changed.wait_for(lambda: any(s.ready for s in self.servers) or self._gone())
        except TimeoutError as error:
            raise RolloutError(f"none of the SGLang servers {self._names()} came back") from error
        by_name = {server.address: server for server in self.servers if server.ready}
        if not by_name:
            raise RolloutError(
                f"none of the SGLang servers {self._names()} is left: {self.servers[0].failure}"
            ) from self.servers[0].failure
        return by_name[self._router.pick(ids, {name: server.in_flight for name, server in by_name.items()})]

    def _gone(self) -> bool:
        return all(server.failure is not None for server in self.servers)

    def _names(self) -> str:
        return ", ".join(server.address for server in self.servers)

    def abort(self, server: Server, rid: str) -> None:
        """Have ``server`` forget a request; nobody waits for that."""
        if not self.closing:
            task = asyncio.ensure_future(server.abort(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    # -------------------------------------------------------------- recovery

    def lost(self, server: Server, error: BaseException) -> None:
        """See to it that ``server`` comes back; it gets no requests until then."""
        if server.ready and not self.closing:
            logger.warning("lost an SGLang server: %s", error)
            server.ready = False
            self._router.forget(server.address)
            server.recovery = asyncio.ensure_future(self._recover(server))

    async def _recover(self, server: Server) -> None:
        try:
            await self._revive(server)
            async with self._weights_lock:
                assert self._weights is not None
                await self._bring_up_to_date(server, self._weights)
            await self._announce(server)
            logger.warning(
                "SGLang server %s is back with weights of version %d", server.address, server.version
            )
        except RolloutError as error:
            logger.error("SGLang server %s does not come back: %s", server.address, error)
            async with self._changed:
                server.failure = error
                self._changed.notify_all()

    async def _revive(self, server: Server) -> None:
        """Wait for the server, or start a new process in place of one that has ended."""
        if server.process is not None and server.start is not None:
            # Its connections break before its process is gone.
            for _ in range(20):
                if not server.process.alive:
                    break
                await asyncio.sleep(0.05)
            if not server.process.alive:
                if not self.options.restart:
                    server.process.require_alive(server.address)
                await asyncio.to_thread(server.process.stop)
                server.process = await asyncio.to_thread(server.start)
        await server.wait_until_up(self.options.start_timeout_s)

    # --------------------------------------------------------------- weights

    async def install(self, weights: Weights) -> None:
        """Have all servers serve ``weights``; those that are lost on the way get them when they are back.

        Raises `WeightsError` when a server refuses them; then all have what they had before.
        """
        await self._settled()
        async with self._weights_lock:
            before = self._weights
            assert before is not None
            present = self._present()
            results = await self._on_paused(present, weights)
            refused = [error for error in results if error is not None and not isinstance(error, Unreachable)]
            if refused:
                restored = await self._on_paused(present, before)
                weights.discard()
                for server, error in zip(present, restored, strict=True):
                    if error is not None:
                        self.lost(server, error)
                raise WeightsError(
                    f"the weights of version {weights.version} were refused: {refused[0]}"
                ) from refused[0]
            self._weights = weights
            before.discard()
        for server, error in zip(present, results, strict=True):
            if error is not None:
                self.lost(server, error)
        await self._settled()
        if not any(server.ready for server in self.servers):
            raise WeightsError(f"no server is left: {self.servers[0].failure}") from self.servers[0].failure

    async def settled(self) -> list[Server]:
        """The servers that serve, after those on their way back have come."""
        await self._settled()
        return self._present()

    async def _settled(self) -> None:
        """Wait for servers that are on their way back."""
        running = [s.recovery for s in self.servers if s.recovery is not None and not s.recovery.done()]
        await asyncio.gather(*running)

    async def _on_paused(self, servers: Sequence[Server], weights: Weights) -> list[BaseException | None]:
        """Load ``weights`` on each of ``servers`` while it computes nothing; how each of them failed, or None."""
        mode = "retract" if self.options.in_flight == "continue" else "abort"
        limit_s = self.options.update_timeout_s

        async def one(server: Server) -> None:
            await server.pause(mode, limit_s)
            try:
                await weights.load(server, limit_s)
                await server.label(weights.version)
            finally:
                if not self._paused:
                    await server.go_on(limit_s)

        results = await asyncio.gather(*map(one, servers), return_exceptions=True)
        for error in results:
            if error is not None and not isinstance(
                error, Unreachable | Refused | ServerTimeout | WeightsError
            ):
                raise error
        return list(results)

    async def adopt(self, policy: Policy) -> None:
        """Have all servers answer with the adapter of ``policy`` from now on; requests in flight keep theirs.

        Servers that are lost on the way get it when they are back. Raises `WeightsError` when one refuses it; then
        all go on as they were.
        """
        await self._settled()
        limit_s = self.options.update_timeout_s
        async with self._weights_lock:
            present = self._present()
            loads = (server.load_adapter(policy, limit_s) for server in present)
            results = await asyncio.gather(*loads, return_exceptions=True)
            refused = [error for error in results if error is not None and not isinstance(error, Unreachable)]
            if refused:
                await self._forget([policy])
                raise WeightsError(
                    f"the adapter of version {policy.version} was refused: {refused[0]}"
                ) from refused[0]
            before, self._policy = self._policy, policy
            before.last = before.version
            self._replaced.append(before)
            turns = await asyncio.gather(*map(self._turn_to_policy, present), return_exceptions=True)
            await self._forget([old for old in self._replaced if not old.in_flight.total()])
        for server, error in zip([*present, *present], [*results, *turns], strict=True):
            if error is not None:
                self.lost(server, error)
        await self._settled()
        if not any(server.ready for server in self.servers):
            raise WeightsError(f"no server is left: {self.servers[0].failure}") from self.servers[0].failure

    async def _turn_to_policy(self, server: Server) -> None:
        limit_s = self.options.update_timeout_s
        if self.options.in_flight == "abort":
            await server.pause("abort", limit_s)
        await server.label(self._policy.version)
        server.policy = self._policy
        if self.options.in_flight == "abort" and not self._paused:
            await server.go_on(limit_s)

    async def _forget(self, policies: Sequence[Policy]) -> None:
        """Unload adapters that no request needs any more, and remove their files."""
        self._replaced = [policy for policy in self._replaced if policy not in policies]
        for policy in policies:
            if policy.name is not None:
                await asyncio.gather(*(server.unload_adapter(policy) for server in self._present()))
            policy.discard()

    @property
    def _version(self) -> int:
        assert self._weights is not None
        return self._weights.version if self._policy.name is None else self._policy.version

    async def label(self, version: int) -> None:
        """Tokens from now on carry ``version``."""
        await self._settled()
        async with self._weights_lock:
            assert self._weights is not None
            self._weights.version = self._policy.version = version
            await self._on_present(lambda server: server.label(version))

    # ------------------------------------------------------- pause and memory

    async def pause(self) -> None:
        """Interrupt what is in flight."""
        self._paused = True
        limit_s = self.options.update_timeout_s
        await self._on_present(lambda server: server.pause("retract", limit_s))

    async def resume(self) -> None:
        """Go on with it."""
        self._paused = False
        await self._on_present(lambda server: server.go_on(self.options.update_timeout_s))

    async def _on_present(self, order: Callable[[Server], Awaitable[None]]) -> None:
        """Give an order to all servers; one that cannot be reached is lost, and gets it when it is back."""
        await asyncio.gather(*(self._order(server, order(server)) for server in self._present()))

    async def _order(self, server: Server, order: Awaitable[None]) -> None:
        try:
            await order
        except Unreachable as error:
            self.lost(server, error)

    async def release_memory(self) -> None:
        """Give the accelerator's memory back."""
        await self._settled()
        limit_s = self.options.update_timeout_s
        await asyncio.gather(*(s.control("/release_memory_occupation", {}, limit_s) for s in self._present()))

    async def resume_memory(self) -> None:
        """Take it again, and the weights too: a server keeps no copy of them unless it was told to."""
        limit_s = self.options.update_timeout_s
        await asyncio.gather(*(s.control("/resume_memory_occupation", {}, limit_s) for s in self._present()))
        async with self._weights_lock:
            assert self._weights is not None
            for error in await self._on_paused(self._present(), self._weights):
                if error is not None:
                    raise error
            if self._policy.name is not None:
                await asyncio.gather(*map(self._load_again, self._present()))

    async def _load_again(self, server: Server) -> None:
        """Its copy may be gone with the memory."""
        await server.unload_adapter(self._policy)
        await server.load_adapter(self._policy, self.options.update_timeout_s)
        await server.label(self._version)

    def _present(self) -> list[Server]:
        return [server for server in self.servers if server.ready]


def make_api(address: str, session: aiohttp.ClientSession, options: SglangOptions) -> Api:
    """The interface of the server at ``address``."""
    key = options.api_key
    return Api(address, session, None if key is None else key.get_secret_value())
