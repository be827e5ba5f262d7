"""Rewards from an HTTP endpoint: requests, responses and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from core_rl.errors import RolloutError
from core_rl.servers.process import bound
from core_rl_trainer.rewards import http
from core_rl_trainer.rewards.http import HttpReward

Answer = Callable[[dict[str, Any]], web.Response]


async def asked(answer: Answer | None, completion: str | list[str] = "4", **sample: Any) -> Any:
    """Reward of an endpoint that answers ``answer``; None is a missing endpoint."""

    async def handle(request: web.Request) -> web.Response:
        assert answer is not None
        return answer(await request.json())

    app = web.Application()
    app.router.add_post("/score", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    with bound("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        if answer is not None:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        reward = HttpReward(f"http://127.0.0.1:{port}/score", batched=isinstance(completion, list))
        try:
            return await reward(completion, sample)
        finally:
            await reward.close()
            await runner.cleanup()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.0)


def test_completion_and_sample_are_sent_without_own_fields() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> web.Response:
        seen.append(body)
        return web.json_response({"reward": 0.25, "reason": "close"})

    assert asyncio.run(asked(answer, prompt="2+2=", _number=3)) == 0.25
    assert seen == [{"completion": "4", "sample": {"prompt": "2+2="}}]


def test_batched_endpoint_gets_all_completions() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> web.Response:
        seen.append(body)
        return web.json_response({"rewards": [0.25, 1]})

    assert asyncio.run(asked(answer, ["4", "5"], prompt="2+2=")) == [0.25, 1]
    assert seen == [{"completions": ["4", "5"], "sample": {"prompt": "2+2="}}]
    with pytest.raises(RolloutError, match=r'JSON object \{"rewards": \[NUMBER, …\]\}'):
        asyncio.run(asked(lambda _: web.json_response({"rewards": [True, 1]}), ["4", "5"]))


def test_an_overloaded_endpoint_is_asked_again() -> None:
    statuses = [503, 429]

    def answer(_body: dict[str, Any]) -> web.Response:
        return web.Response(status=statuses.pop()) if statuses else web.json_response({"reward": 1})

    assert asyncio.run(asked(answer)) == 1
    assert not statuses


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"cannot be reached: ClientConnectorError: .*, 4 times\nfix: start the endpoint"),
        (lambda _: web.Response(status=503, text="busy"), r"answered status 503: 'busy', 4 times\nfix"),
        (lambda _: web.Response(status=403, text="who?"), r"answered status 403: 'who\?'\nfix: look at"),
        (lambda _: web.Response(text="good"), r"answered 'good'\nfix: the endpoint answers with the JSON"),
        (lambda _: web.json_response([1.0]), r"answered '\[1.0\]'"),
        (lambda _: web.json_response({"score": 1.0}), r"answered '\{\"score\": 1.0\}'"),
        (lambda _: web.json_response({"reward": "1"}), r"answered '\{\"reward\": \"1\"\}'"),
        (lambda _: web.json_response({"reward": True}), r"answered '\{\"reward\": true\}'"),
    ],
)
def test_an_endpoint_without_a_reward_is_an_error(answer: Answer | None, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        asyncio.run(asked(answer))
