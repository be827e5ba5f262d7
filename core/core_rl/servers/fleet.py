"""`Fleet`: several servers with the same weights, adapter, version and state, and their checks before any change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from core_rl.backend.meta import SyncMethod
from core_rl.config.engine import DType
from core_rl.errors import ConfigError, RolloutError, WeightsError, raise_all
from core_rl.servers.adapters import ServedAdapter, ServedModel
from core_rl.servers.api import DENIED, Refused, Unreachable
from core_rl.servers.config import Interrupt, ServerOptions
from core_rl.servers.facts import FRESH, RUN, ServerFacts, is_directory, misfits, owner_of, warn_if_untested
from core_rl.servers.pool import Failures, ServerPool, failures
from core_rl.servers.server import LoadsAdapters, ReleasesMemory, Server
from core_rl.servers.weights import Weights

CONNECT_S = 5.0
"""Time limit for a connection to a server that is up."""


class Fleet:
    """The servers of one engine, connected to ``weights``. All methods run on one event loop.

    A server computes nothing from the moment when it begins to receive weights until all servers have all of them, and
    it has their version. While an update is undone, no server computes, and none has the version of the update.
    """

    def __init__(
        self,
        options: ServerOptions,
        servers: Sequence[Server],
        model: ServedModel,
        dtype: DType,
        weights: Weights,
    ) -> None:
        self.pool = ServerPool(options, servers, self._restore)
        self._interrupt = options.in_flight
        self.update_timeout_s = options.update_timeout_s
        self._weights_lock = asyncio.Lock()
        self._model = model
        self._dtype = dtype
        self._weights = weights
        self._adapter = ServedAdapter(weights.version)
        """The adapter over the servers' weights, or none."""
        self._replaced: list[ServedAdapter] = []
        """Adapters that requests in flight may still need."""
        self._paused = False

    # ------------------------------------------------------------ life cycle

    async def connect(self) -> None:
        """Wait for all servers and have them serve the weights.

        Raises `ConfigError`, before anything is changed on a server, where one has another model, or serves others.
        """
        facts = await asyncio.gather(*map(self._wait_for_facts, self.pool.servers))
        self._require_fit(dict(zip(self.pool.servers, facts, strict=True)))
        await asyncio.gather(*map(self._connect, self.pool.servers))

    async def _wait_for_facts(self, server: Server) -> ServerFacts:
        return await server.wait_for_facts(self.pool.options.start_timeout_s)

    def _require_fit(self, facts: Mapping[Server, ServerFacts]) -> None:
        require_servers(facts, self._model, self._dtype, self._weights.origin)

    async def _connect(self, server: Server) -> None:
        try:
            await server.wait_until_up(self.pool.options.start_timeout_s)
            await self._bring_up_to_date(server)
        except Unreachable:
            if await server.has_ended():
                server.require_alive()  # raises with the end of its log
            raise
        await self._add(server)

    async def _restore(self, server: Server) -> None:
        self._require_fit({server: await self._wait_for_facts(server)})
        await server.wait_until_up(self.pool.options.start_timeout_s)
        async with self._weights_lock:
            await self._bring_up_to_date(server)
            await self._add(server)

    async def _bring_up_to_date(self, server: Server) -> None:
        facts = await server.facts()
        self._require_fit({server: facts})
        server.ranks, server.device, server.limits = facts.ranks, facts.device, facts.limits
        if not server.steered:
            server.version = self._version
            return
        # Only a fresh server is known to serve what its path says.
        if facts.label != FRESH or not is_directory(facts.path, self._weights.origin):
            await self._load(server, self._weights, "continue")
        if self._adapter.name is not None:
            await _load(server, self._adapter)
        server.adapter = self._adapter
        await self._label(server)
        if self._paused:
            await server.pause("continue")

    async def _add(self, server: Server) -> None:
        await self.pool.add(server)
        if (
            server.steered and not self._paused
        ):  # any more: a resume() in the meantime did not reach this server
            try:
                await server.continue_generation()
            except Unreachable as error:
                self.pool.mark_lost(server, error)

    async def close(self) -> None:
        """Abandon requests in flight; connections and processes are not ended here."""
        self.pool.close()
        adapters = [*self._replaced, self._adapter]
        # A server unloads no adapter that a request still needs.
        await self._forget([adapter for adapter in adapters if not adapter.in_flight])
        for adapter in adapters:
            adapter.discard()
        self._weights.discard()

    def require_steered(self, purpose: str) -> None:
        """Raise `ConfigError` where ``purpose`` would change a server that this engine may not change."""
        foreign = [server.name for server in self.pool.servers if not server.steered]
        if foreign:
            raise ConfigError(
                f"options.take_over = false: {purpose} would change {', '.join(foreign)}, which others started; set it "
                "to true where nobody else uses them"
            )

    def require_updatable(self, method: SyncMethod) -> None:
        """Raise `ConfigError` where a server may not be changed, or would not have the weights of ``method``."""
        self.require_steered("an update of weights")
        tied = _is_tied(self._model)
        problems = [
            f"{server.name} {problem}; {server.limits.remedy}"
            for server in self.pool.servers
            if (problem := server.limits.update_problem(method, tied=tied))
        ]
        raise_all(ConfigError, f"sync by {method!r}", problems)

    # --------------------------------------------------------------- weights

    async def install(self, weights: Weights) -> None:
        """Have all servers serve ``weights``; servers that are lost on the way get them when they are back.

        Raises `WeightsError` when a server refuses them; then all have the previous weights.
        """
        await self.pool.wait_recovered()
        async with self._weights_lock:
            servers = self.pool.ready
            failed = await self._load_all(servers, weights)
            if refusal := _refusal(failed):
                failed = await self._load_all(servers, self._weights)
                weights.discard()
            else:
                self._weights.discard()
                self._weights = weights
            await self._continue(servers, failed)
        if refusal is not None:
            raise WeightsError(
                f"the weights of version {weights.version} were refused: {refusal}"
            ) from refusal
        await self._require_one()

    async def _load_all(self, servers: Sequence[Server], weights: Weights) -> Failures:
        """Load ``weights`` on all ``servers``; none of them computes until `_continue`."""
        return await failures(lambda server: self._load(server, weights, self._interrupt), servers)

    async def _load(self, server: Server, weights: Weights, interrupt: Interrupt) -> None:
        server.weights_intact = False
        await server.pause(interrupt)
        await weights.load(server)

    async def _label(self, server: Server) -> None:
        """Give ``server`` the version of the weights that it has loaded."""
        await server.set_weight_version(self._version)
        server.weights_intact = True

    async def _continue(self, servers: Sequence[Server], failed: Failures) -> None:
        """Label the servers that have not ``failed``, and let them compute unless paused; the others are lost."""
        loaded = [server for server in servers if server not in failed]
        unlabelled = await failures(self._label, loaded)
        self.pool.mark_failed(failed | unlabelled)
        if not self._paused:
            labelled = [server for server in loaded if server not in unlabelled]
            self.pool.mark_failed(await failures(Server.continue_generation, labelled))

    async def _require_one(self) -> None:
        await self.pool.wait_recovered()
        if not self.pool.ready:
            failure = self.pool.servers[0].failure
            raise WeightsError(f"no server is left: {failure}") from failure

    async def ready_servers(self) -> list[Server]:
        """The servers that are ready after the present recoveries."""
        await self.pool.wait_recovered()
        return self.pool.ready

    @property
    def _version(self) -> int:
        return self._weights.version if self._adapter.name is None else self._adapter.version

    async def set_weight_version(self, version: int) -> None:
        """Tokens from now on carry ``version``."""
        self.require_steered("set_version()")
        await self.pool.wait_recovered()
        async with self._weights_lock:
            self._weights.version = self._adapter.version = version
            await self.pool.post(lambda server: server.set_weight_version(version))

    # -------------------------------------------------------------- adapters

    async def install_adapter(self, adapter: ServedAdapter) -> None:
        """Have all servers serve new requests by ``adapter``; requests in flight keep theirs.

        Servers that are lost on the way get it when they are back. Raises `WeightsError` when one refuses it; then
        all serve the adapter that they had.
        """
        await self.pool.wait_recovered()
        async with self._weights_lock:
            servers = self.pool.ready
            failed = await failures(lambda server: _load(server, adapter), servers)
            if refusal := _refusal(failed):
                await self._forget([adapter])
                raise WeightsError(
                    f"the adapter of version {adapter.version} was refused: {refusal}"
                ) from refusal
            self._adapter.last_version = self._adapter.version
            self._replaced.append(self._adapter)
            self._adapter = adapter
            failed = await failures(self._switch_adapter, servers) | failed
            await self._forget([old for old in self._replaced if not old.in_flight])
        self.pool.mark_failed(failed)
        await self._require_one()

    async def _switch_adapter(self, server: Server) -> None:
        if self._interrupt == "abort":
            await server.pause("abort")
        await server.set_weight_version(self._adapter.version)
        server.adapter = self._adapter
        if self._interrupt == "abort" and not self._paused:
            await server.continue_generation()

    async def _forget(self, adapters: Sequence[ServedAdapter]) -> None:
        """Unload adapters that no request needs any more, and remove their files."""
        self._replaced = [adapter for adapter in self._replaced if adapter not in adapters]
        for adapter in adapters:
            if adapter.name is not None:
                await asyncio.gather(*(_unload(server, adapter) for server in self.pool.ready))
            adapter.discard()

    # ------------------------------------------------------- pause and memory

    async def pause(self) -> None:
        """Interrupt requests in flight; where a server refuses, all continue."""
        self.require_steered("pause()")
        self._paused = True
        try:
            await self.pool.post(lambda server: server.pause("continue"))
        except BaseException:
            await self.resume()
            raise

    async def resume(self) -> None:
        """Continue interrupted requests; servers that are receiving weights do when they have all of them."""
        self._paused = False
        await self.pool.post(Server.continue_generation)

    async def release_memory(self) -> None:
        """Free the accelerators' memory."""
        self.require_steered("release_memory()")
        await self.pool.wait_recovered()
        await asyncio.gather(*(cast("ReleasesMemory", s).release_memory() for s in self.pool.ready))

    async def resume_memory(self) -> None:
        """Allocate the memory again, and load the weights: by default a server keeps no copy of them."""
        await asyncio.gather(*(cast("ReleasesMemory", s).resume_memory() for s in self.pool.ready))
        async with self._weights_lock:
            servers = self.pool.ready
            failed = await self._load_all(servers, self._weights)
            if self._adapter.name is not None and not failed:
                failed = await failures(self._reload_adapter, servers)
            await self._continue(servers, failed)
        for error in failed.values():
            raise error

    async def _reload_adapter(self, server: Server) -> None:
        """Load the adapter again: the server's copy may have been freed with the memory."""
        await _unload(server, self._adapter)
        await _load(server, self._adapter)


async def _load(server: Server, adapter: ServedAdapter) -> None:
    await cast("LoadsAdapters", server).load_adapter(adapter)


async def _unload(server: Server, adapter: ServedAdapter) -> None:
    await cast("LoadsAdapters", server).unload_adapter(adapter)


def _refusal(failed: Failures) -> BaseException | None:
    """The first error that is more than a lost connection."""
    return next((error for error in failed.values() if not isinstance(error, Unreachable)), None)


async def facts_of_running(servers: Sequence[Server]) -> dict[Server, ServerFacts]:
    """The facts of servers that have to be up, without a change to one.

    Raises one `ConfigError` for all servers that cannot be reached, or are none of their product.
    """
    answers = await asyncio.gather(*map(_facts_or_problem, servers))
    raise_all(ConfigError, "options.addresses", [answer for answer in answers if isinstance(answer, str)])
    return {
        server: answer for server, answer in zip(servers, answers, strict=True) if not isinstance(answer, str)
    }


async def _facts_or_problem(server: Server) -> ServerFacts | str:
    product = server.api.product
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(server.host, server.address.rpartition(":")[2])
    except OSError as error:
        reason = error.strerror or str(error) or f"no connection within {CONNECT_S:g} s"
        return f"nothing answers at {server.address} ({reason}); start a {product} server there, or correct the address"
    writer.close()
    try:
        return await server.facts()
    except ConfigError as error:
        return str(error)
    except RolloutError as error:
        denied = isinstance(error, Refused) and error.status in DENIED
        return str(error) if denied else f"{error}; name the address of a {product} server over HTTP"


def require_servers(
    facts: Mapping[Server, ServerFacts], model: ServedModel, dtype: DType, origin: str
) -> None:
    """Raise one `ConfigError` with every reason for which servers cannot serve ``model`` in ``dtype``.

    ``origin`` is the directory of weights that a server which this engine may not change has to serve. Logs one warning
    for each untested version of the product.
    """
    problems = {
        server.name: list(_problems(server, known, model, dtype, origin)) for server, known in facts.items()
    }
    raise_all(
        ConfigError,
        f"model.path = {str(model.path)!r} does not fit servers, on which nothing was changed",
        (f"{name}: {problem}" for name, listed in problems.items() for problem in listed),
    )
    for server, known in facts.items():
        if known.release is not None:
            warn_if_untested(server.api.product, known.release, server.tested)


def _problems(
    server: Server, facts: ServerFacts, model: ServedModel, dtype: DType, origin: str
) -> Iterator[str]:
    if server.start is None and (other := list(misfits(facts, model, dtype))):
        yield from other
        return
    connected, owner = server.version >= 0, owner_of(facts.label)
    by = f"the run {owner}" if owner is not None else f"a user that labels its weights {facts.label!r}"
    if server.steered:
        if connected and facts.label != FRESH and owner != RUN:
            yield f"{by} has taken it over since this engine connected to it"
        elif not is_directory(facts.path, origin) or (facts.label != FRESH and owner != RUN):
            problem = facts.limits.update_problem("disk", tied=_is_tied(model))
            if problem is not None:
                yield f"it {problem}; start it with model.path, or {facts.limits.remedy}"
    elif facts.label != FRESH:
        yield f"{by} steers it; name another server, or take it over by options.take_over = true"
    elif not is_directory(facts.path, origin):
        yield f"it serves {facts.path!r}; to load the weights of model.path into it, set options.take_over to true"


def _is_tied(model: ServedModel) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))
