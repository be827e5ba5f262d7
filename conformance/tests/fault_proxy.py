"""A proxy in front of a server of vLLM's routes, which bends requests and responses."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from server_stub import ServerStub

Body = dict[str, Any]


class Bend:
    """Passes everything on."""

    def request(self, path: str, body: Body) -> Body | None:
        """The body to send; None answers with an empty object, and sends nothing."""
        return body

    def response(self, path: str, body: Body, content: Body) -> Body:
        """The response to ``body``, which is the client's own, from the server's ``content``."""
        return content


class FaultProxy(ServerStub):
    """Stands at its own address for the server at ``target``."""

    def __init__(self, target: str, model_path: str, bend: Bend) -> None:
        super().__init__(model_path)
        self.target = target
        self.bend = bend
        self._session: aiohttp.ClientSession | None = None

    async def usual(self, request: web.Request, body: Body) -> web.StreamResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        sent = self.bend.request(request.path, body)
        if sent is None:
            return web.json_response({})
        url = f"http://{self.target}{request.path_qs}"
        try:
            async with self._session.request(request.method, url, json=sent or None) as answer:
                content = await answer.json() if "json" in answer.content_type else await answer.read()
        except aiohttp.ClientError:
            return web.Response(status=web.HTTPBadGateway.status_code)
        if isinstance(content, bytes):
            return web.Response(body=content, status=answer.status)
        if answer.status == web.HTTPOk.status_code and isinstance(content, dict):
            content = self.bend.response(request.path, body, content)
        return web.json_response(content, status=answer.status)

    def close(self) -> None:
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(10)
        super().close()
