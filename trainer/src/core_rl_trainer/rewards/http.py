"""Rewards from an HTTP endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core_rl.errors import ConfigError, RolloutError
from core_rl_trainer.data.plain import json_text, sample_fields, shown

if TYPE_CHECKING:
    import aiohttp

ATTEMPTS = 4
FIRST_DELAY_S = 0.25
"""Before the second attempt; it doubles."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a later attempt may succeed."""
HEADERS = {"Content-Type": "application/json"}
SHOWN = 200
"""Characters of an answer that an error shows."""


def is_url(name: str) -> bool:
    """Whether ``name`` is the address of an HTTP endpoint, and no function."""
    return name.startswith(("http://", "https://"))


class _Unavailable(RolloutError):
    """Another attempt may succeed."""


class HttpReward:
    """A `TextRewardFn` that posts ``{"completion": text, "sample": {…}}`` and reads ``{"reward": number}``, or null.

    The sample has the fields of the data, as `json_text` writes them.

    A batched one is a `BatchedTextRewardFn`: it posts ``completions``, a list of texts, and reads ``rewards``.
    An endpoint that cannot be reached, or is overloaded (status 429 or 5xx), is asked `ATTEMPTS` times. Belongs to
    the event loop of its first call, on which `close` runs too. Raises `ConfigError` where aiohttp is not installed.
    """

    def __init__(self, url: str, batched: bool = False) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f'the reward {url} needs aiohttp, which is not installed; pip install "core-rl-trainer[http]"'
            ) from error
        self.__name__ = url
        self._url = url
        self._batched = batched
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, completion: str | list[str], sample: Mapping[str, Any], /) -> Any:
        """The reward, or the list of rewards. Raises `RolloutError` for a status or an answer that is no reward."""
        name = "completions" if self._batched else "completion"
        body = json_text({name: completion, "sample": sample_fields(sample)}).encode(
            errors="backslashreplace"
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _parsed(await self._post(body), self._batched)
            except _Unavailable as error:
                if attempt == ATTEMPTS:
                    raise RolloutError(
                        f"{error}, {ATTEMPTS} times\nfix: start the endpoint, or correct its address in the recipe"
                    ) from error
            await asyncio.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: bytes) -> bytes:
        import aiohttp

        if self._session is None:
            # The time limit is that of all rewards, around the call.
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(self._url, data=body, headers=HEADERS) as response:
                content = await response.read()
                if response.status == 200:
                    return content
                message = f"answered status {response.status}: {_shown(content)}"
                if response.status in PASSING:
                    raise _Unavailable(message)
                raise RolloutError(
                    f"{message}\nfix: look at the endpoint's log; it gets completion and sample as JSON"
                )
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Unavailable(f"cannot be reached: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _parsed(content: bytes, batched: bool) -> Any:
    """The reward, or the list of rewards, of a response. Raises `RolloutError`."""
    name, form = ("rewards", "[NUMBER, …]") if batched else ("reward", "NUMBER")
    unusable = RolloutError(
        f'answered {_shown(content)}\nfix: the endpoint answers with the JSON object {{"{name}": {form}}}'
    )
    try:
        value = json.loads(content)[name]
    except (ValueError, KeyError, TypeError) as error:
        raise unusable from error
    if batched and isinstance(value, list) and all(map(_is_number, value)):
        return value
    if batched or not _is_number(value):
        raise unusable
    return value


def _is_number(value: object) -> bool:
    """Whether ``value`` is a number, or None: the reward does not apply."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _shown(content: bytes) -> str:
    return shown(content.decode(errors="replace"), SHOWN)
