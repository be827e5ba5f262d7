"""Requests to a fleet: each gives one response, from whichever server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from core_rl.data.requests import LLMRequest, LLMResponse, PartialResponse
from core_rl.errors import EngineStateError
from core_rl_sglang.adapters import ServedAdapter
from core_rl_sglang.api import Refused, ServerTimeout, Unreachable
from core_rl_sglang.pool import ServerPool
from core_rl_sglang.responses import StaleServer, generation_body, to_partial_response, to_response
from core_rl_sglang.server import Server

__all__ = ["Requests"]

_Result = TypeVar("_Result")

FIRST_RETRY_S = 0.1


class Requests:
    """Requests to the servers of ``pool``. All methods run on its event loop."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._timeout_s = pool.options.request_timeout_s

    async def generate(self, request: LLMRequest, eos: Collection[int]) -> LLMResponse:
        """The response to ``request`` from any server; sent again where a server is lost on the way."""

        def read(response: Any, server: Server, adapter: ServedAdapter) -> LLMResponse:
            return _with_versions(adapter, to_response(request, response, eos, server.address))

        return await self.call(generation_body(request, request.rid), read)

    async def stream(
        self, request: LLMRequest, eos: Collection[int]
    ) -> AsyncGenerator[PartialResponse | LLMResponse]:
        """Parts of a response as they come, and the response. Closed before its end, the request is aborted.

        Sent again where a server is lost before the first part; after it, raises `Unreachable`.
        """
        seen = 0
        for left in range(self._pool.options.retries, -1, -1):
            server, rid = await self._pool.pick(request.input_ids), f"{request.rid}-{left}-"
            complete = False
            try:
                with server.busy() as adapter:
                    body = {**generation_body(request, rid), **adapter.fields, "stream": True}
                    async for event in server.api.events("/generate", body, self._timeout_s):
                        part = to_partial_response(event, seen, server.address)
                        complete = part is None
                        seen += 0 if part is None else len(part.output_ids)
                        yield part or _with_versions(
                            adapter, to_response(request, event, eos, server.address)
                        )
                        if complete:
                            return
                raise Unreachable(
                    f"SGLang server {server.address} ended the stream of request {request.rid} too early"
                )
            except (Unreachable, StaleServer) as error:
                self._pool.mark_lost(server, error)
                if seen or not left or self._pool.closing:
                    raise
            finally:
                if not complete and server.ready:
                    self._pool.abort(server, rid)

    async def call(
        self, body: Mapping[str, Any], read: Callable[[Any, Server, ServedAdapter], _Result]
    ) -> _Result:
        """``read(response, server, adapter)`` of the response to ``body``.

        Where the connection breaks, it is sent again with another rid, perhaps to another server. The attempt before
        is aborted, so that one call gives one sample.
        """
        left, delay_s = self._pool.options.retries, FIRST_RETRY_S
        try:
            while True:
                server = await self._pool.pick(body["input_ids"])
                # A server aborts every request whose rid begins so.
                rid = f"{body['rid']}-{left}-"
                try:
                    with server.busy() as adapter:
                        return read(await self._post(server, adapter, {**body, "rid": rid}), server, adapter)
                except (Unreachable, StaleServer) as error:
                    self._pool.mark_lost(server, error)
                    if not left or self._pool.closing:
                        raise
                except (asyncio.CancelledError, ServerTimeout):
                    self._pool.abort(server, rid)
                    raise
                await asyncio.sleep(delay_s)
                left, delay_s = left - 1, 2 * delay_s
        except (asyncio.CancelledError, Unreachable):
            if self._pool.closing:
                raise EngineStateError("the engine was destroyed while this request was in flight") from None
            raise

    async def _post(self, server: Server, adapter: ServedAdapter, body: Mapping[str, Any]) -> Any:
        """The response to ``body``; `StaleServer` where ``server`` does not know ``adapter`` any more."""
        try:
            return await server.api.post("/generate", {**body, **adapter.fields}, self._timeout_s)
        except Refused as error:
            if adapter.name is not None and adapter.name in str(error):
                raise StaleServer(
                    f"SGLang server {server.address} does not know its adapter: {error}"
                ) from error
            raise


def _with_versions(adapter: ServedAdapter, response: LLMResponse) -> LLMResponse:
    """``response`` with the versions of ``adapter``, which drew it."""
    return replace(response, versions=tuple(map(adapter.version_of, response.versions)))
