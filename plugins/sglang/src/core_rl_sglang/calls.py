"""Requests to a fleet: each gives one answer, whichever server it comes from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import EngineStateError
from core_rl_sglang.adapters import Policy
from core_rl_sglang.answers import Piece, StaleServer, generation_body, next_piece, to_response
from core_rl_sglang.api import Refused, ServerTimeout, Unreachable
from core_rl_sglang.fleet import Fleet
from core_rl_sglang.server import Server

__all__ = ["Requests", "generated"]

_Answer = TypeVar("_Answer")

FIRST_PAUSE_S = 0.1


class Requests:
    """What is asked of the servers of ``fleet``. All methods run on its event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: LLMRequest, eos: Collection[int]) -> LLMResponse:
        """The answer to ``request``, from whichever server; asked again where a server is lost on the way."""

        async def ask(server: Server, rid: str, policy: Policy) -> LLMResponse:
            body = generation_body(request, rid)
            answer = await generated(server, policy, body, self._fleet.options.request_timeout_s)
            return _by(policy, to_response(request, answer, eos, server.address))

        return await self.call(request.rid, request.input_ids, ask)

    async def stream(self, request: LLMRequest, eos: Collection[int]) -> AsyncGenerator[Piece | LLMResponse]:
        """The pieces of an answer as they come, and the answer. Closed before its end, the request is aborted.

        Asked again where a server is lost before the first piece; after it, raises `Unreachable`.
        """
        seen = 0
        for left in range(self._fleet.options.retries, -1, -1):
            server, rid = await self._fleet.pick(request.input_ids), f"{request.rid}-{left}-"
            answered = False
            try:
                with server.busy() as policy:
                    body = {**generation_body(request, rid), **policy.fields, "stream": True}
                    async for event in server.api.events(
                        "/generate", body, self._fleet.options.request_timeout_s
                    ):
                        piece = next_piece(event, seen, server.address)
                        answered = piece is None
                        seen += 0 if piece is None else len(piece.output_ids)
                        yield piece or _by(policy, to_response(request, event, eos, server.address))
                        if answered:
                            return
                raise Unreachable(f"SGLang server {server.address} left request {request.rid} half answered")
            except (Unreachable, StaleServer) as error:
                self._fleet.lost(server, error)
                if seen or not left or self._fleet.closing:
                    raise
            finally:
                if not answered and server.ready:
                    self._fleet.abort(server, rid)

    async def call(
        self, rid: str, ids: Sequence[int], ask: Callable[[Server, str, Policy], Awaitable[_Answer]]
    ) -> _Answer:
        """``ask(server, rid, policy)``, again with another name and perhaps another server if the connection breaks.

        The attempt before is forgotten by the server, so that one call gives one sample.
        """
        try:
            return await self._attempts(rid, ids, ask)
        except (asyncio.CancelledError, Unreachable):
            if self._fleet.closing:
                raise EngineStateError("the engine was destroyed while this request was in flight") from None
            raise

    async def _attempts(
        self, rid: str, ids: Sequence[int], ask: Callable[[Server, str, Policy], Awaitable[_Answer]]
    ) -> _Answer:
        pause_s = FIRST_PAUSE_S
        for left in range(self._fleet.options.retries, -1, -1):
            server = await self._fleet.pick(ids)
            # A server aborts every request whose name begins so.
            own = f"{rid}-{left}-"
            try:
                with server.busy() as policy:
                    return await ask(server, own, policy)
            except (Unreachable, StaleServer) as error:
                self._fleet.lost(server, error)
                if not left or self._fleet.closing:
                    raise
                await asyncio.sleep(pause_s)
                pause_s *= 2
            except (asyncio.CancelledError, ServerTimeout):
                self._fleet.abort(server, own)
                raise
        raise AssertionError("the last attempt returns or raises")


async def generated(server: Server, policy: Policy, body: Mapping[str, Any], timeout_s: float) -> Any:
    """The answer of ``server`` to ``body`` with ``policy``.

    Raises `StaleServer` where its adapter is not known any more, and as `Api.post` does.
    """
    try:
        return await server.api.post("/generate", {**body, **policy.fields}, timeout_s)
    except Refused as error:
        if policy.name is not None and policy.name in error.message:
            raise StaleServer(f"SGLang server {server.address} does not know its adapter: {error}") from error
        raise


def _by(policy: Policy, response: LLMResponse) -> LLMResponse:
    """``response`` with the versions of ``policy``, which drew it."""
    return replace(response, versions=tuple(map(policy.version_of, response.versions)))
