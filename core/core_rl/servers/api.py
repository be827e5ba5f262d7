"""The HTTP interface of one server, with an error for each kind of failure."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from core_rl.errors import RolloutError
from core_rl.machine import most_open_files

__all__ = [
    "DENIED",
    "SPARE_FILES",
    "Api",
    "Hung",
    "Refused",
    "ServerTimeout",
    "TooManyFiles",
    "Unreachable",
    "is_exhausted",
    "requests_at_one_time",
]

SHOWN = 300
"""Bytes of a response that are repeated in an error."""
DENIED = (401, 403)
"""Statuses of a server that requires another key."""
FINAL = (200, *DENIED, 404, 405)
"""Statuses of a server that is up: no JSON, no right, no route."""
RESPONSE_S = 10.0
"""Time limit for any response of a server that has exceeded another limit."""
SPARE_FILES = 256
"""Files that are left to everything else: weights, logs, sockets of ranks, calls that control servers."""


class Unreachable(RolloutError):
    """The connection could not be made, or broke; the server may have received the request."""


class Hung(Unreachable):
    """The server did not respond in time, and responds to nothing else either."""


class ServerTimeout(RolloutError):
    """The server did not respond in time."""


class Refused(RolloutError):
    """The server responded with an error, or with something else than JSON."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status
        """The status of the response; 200 for a body that is no JSON."""
        self.is_final = status in FINAL
        """Whether the server will respond in this way however long one waits."""


class Api:
    """Calls to the server at ``address`` (``host:port``). Belongs to the event loop of ``session``.

    ``product`` is what such servers are called in messages.
    """

    def __init__(
        self, address: str, session: aiohttp.ClientSession, api_key: str | None, product: str
    ) -> None:
        self.address = address
        self.product = product
        self.name = f"{product} server {address}"
        """Name in messages."""
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, path: str, timeout_s: float, *, parse: bool = True) -> Any:
        """The JSON response to ``GET path``; see `post`."""
        return await self._call("GET", path, None, timeout_s, parse)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float, *, parse: bool = True) -> Any:
        """The JSON response to ``POST path``, None for an empty one and without ``parse``.

        Raises `Unreachable`, `Hung`, `ServerTimeout`, or `Refused` for any other status than 200 and for
        a response that is not JSON; each names the server.
        """
        return await self._call("POST", path, body, timeout_s, parse)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, parse: bool
    ) -> Any:
        subject, limit = f"{self.name}: {method} {path}", aiohttp.ClientTimeout(total=timeout_s)
        url = f"http://{self.address}{path}"
        call = self._session.request(method, url, json=body, headers=self._headers, timeout=limit)
        try:
            async with call as response:
                content = await response.read()
                if response.status != 200:
                    reason = _reason(content)
                    if response.status in DENIED:
                        reason += "; set options.api_key to the key that the server requires"
                    raise Refused(f"{subject} returned status {response.status}: {reason}", response.status)
                return self._parsed(content, path) if parse else None
        except TimeoutError as error:
            late = f"{subject} got no response within {timeout_s:g} s"
            if await self._responds():
                raise ServerTimeout(late) from error
            raise Hung(f"{late}, and GET / got none within {RESPONSE_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if is_exhausted(error):
                raise TooManyFiles(
                    f"{subject}: this process has too many open files; raise their limit (ulimit -n), or lower "
                    "max_concurrent_rollouts of the engine"
                ) from error
            raise Unreachable(f"{subject}: {type(error).__name__}: {error}") from error

    async def _responds(self) -> bool:
        """Whether the server responds at all; False where it accepts connections, and does nothing with them."""
        limit = aiohttp.ClientTimeout(total=RESPONSE_S)
        try:
            async with self._session.get(f"http://{self.address}/", headers=self._headers, timeout=limit):
                return True
        except TimeoutError:
            return False
        except (aiohttp.ClientError, OSError):
            return True  # it has ended, which the next call shows

    def _parsed(self, content: bytes, path: str) -> Any:
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise Refused(f"{self.name}: {path} returned no JSON: {_shown(content)}", 200) from error


def _reason(content: bytes) -> str:
    """The message of an error, under the names that servers use."""
    try:
        body = json.loads(content)
    except ValueError:
        return _shown(content)
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if name in body), str(body))
    return str(body)[: 3 * SHOWN]


def _shown(content: bytes) -> str:
    text = content[:SHOWN].decode(errors="replace")
    return repr(text + ("..." if len(content) > SHOWN else ""))


class TooManyFiles(RolloutError):
    """This process may open no more files; nothing is wrong with the server."""


def requests_at_one_time() -> int:
    """Requests that may be in flight, after this process's soft limit was raised to its hard one.

    Each may need two files for a moment: where the event loop was late, all idle connections have expired, and their
    files are closed only after the new ones' were opened.
    """
    files = most_open_files()
    return max(1, (files - min(SPARE_FILES, files // 2)) // 2)


def is_exhausted(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is that no more files can be opened."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__
    return False
