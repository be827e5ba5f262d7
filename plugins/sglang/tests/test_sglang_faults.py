"""Servers that are missing, slow or gone, or respond with nonsense. Servers are stubs here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from server_stub import LONGEST, complete, drop, first, request, shorten_wait, slow, wait_for
from sglang_support import Stub, backend_of, connected, generations, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CoreRLError, EngineStateError, RolloutError
from core_rl.servers import api


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with stubs(tmp_path) as made:
        yield made[0]


def test_broken_connection_is_retried_once(stub: Stub) -> None:
    stub.faults["/generate"] = first(2, drop)
    with connected([stub]) as engine:
        (actual,) = complete(engine, request())
    assert actual.output_ids == (7,) * 4
    requested = [body["rid"] for body in generations(stub)]
    assert len(requested) == len(set(requested)) == 3, "each attempt has a name of its own"


def test_attempts_end(stub: Stub) -> None:
    stub.faults["/generate"] = drop
    with connected([stub], retries=2) as engine, pytest.raises(RolloutError, match=stub.address):
        complete(engine, request())
    assert stub.calls["/generate"] == 3


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda r, b: web.json_response({"error": {"message": "boom"}}, status=500), "status 500: boom"),
        (lambda r, b: web.Response(text="<html>proxy</html>"), "no JSON: '<html>proxy</html>'"),
        (lambda r, b: web.json_response({"answer": 42}), "cannot be read"),
        (lambda r, b: web.json_response([1, 2]), "cannot be read"),
        (lambda r, b: web.json_response({"output_ids": [1], "meta_info": {}}), "cannot be read"),
    ],
    ids=["500", "no json", "other json", "a list", "half a response"],
)
def test_malformed_reply_names_server(stub: Stub, reply: Any, says: str) -> None:
    stub.faults["/generate"] = reply
    with connected([stub]) as engine:
        with pytest.raises(RolloutError) as caught:
            complete(engine, request())
        assert says in str(caught.value)
        assert stub.address in str(caught.value)
        stub.faults.clear()
        assert complete(engine, request())[0].output_ids == (7,) * 4, "the engine still works"


def test_a_request_to_a_slow_server_is_aborted(stub: Stub) -> None:
    stub.faults["/generate"] = slow()
    with connected([stub], request_timeout_s=0.2) as engine:
        with pytest.raises(RolloutError, match=f"{stub.address}.*got no response within 0.2 s"):
            complete(engine, request())
        wait_for(lambda: stub.calls["/abort_request"] == 1)


def test_hung_server_is_lost_until_it_responds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RESPONSE_S", 1.0)
    with stubs(tmp_path, 2) as made, connected(made, request_timeout_s=1.0) as engine:
        hung, other = backend_of(engine).servers

        async def hang(_request: web.Request, _body: Any) -> None:
            while made[0].hold:
                await asyncio.sleep(0.01)

        made[0].hold = True
        made[0].faults.update(dict.fromkeys(("/", "/generate", "/model_info"), hang))
        responses = complete(engine, *(request(1, 2, number) for number in range(8)))
        assert all(response.output_ids == (7,) * 4 for response in responses)
        assert made[0].calls["/generate"] and not hung.ready and other.ready
        made[0].hold = False
        wait_for(lambda: hung.ready)


def test_a_cancelled_request_is_aborted_by_its_name(stub: Stub) -> None:
    arrived = threading.Event()

    async def give_up(engine: InferenceEngine) -> None:
        task = asyncio.ensure_future(engine.agenerate(request()))
        await asyncio.to_thread(arrived.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stub.faults["/generate"] = slow(arrived)
    with connected([stub]) as engine:
        asyncio.run(give_up(engine))
        wait_for(lambda: stub.calls["/abort_request"] == 1)
    aborted = next(body for path, body in stub.bodies if path == "/abort_request")
    assert aborted == {"rid": generations(stub)[0]["rid"]}


def test_invalid_prompts_never_reach_server(stub: Stub) -> None:
    with connected([stub]) as engine:
        for wrong in (request(1, 151), request(*[1] * (LONGEST - 2)), request(1, stop_token_ids=(500,))):
            with pytest.raises(RolloutError):
                complete(engine, wrong)
    assert not stub.calls["/generate"]


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    with stubs(tmp_path) as made:
        made[0].stop()
        missing = pytest.raises(RolloutError, match=f"{made[0].address} is not ready after 0.5 s")
        with missing, connected(made, start_timeout_s=0.5):
            pass
        made[0].start()


def test_recovered_server_gets_weights_first(stub: Stub, tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with connected([stub]) as engine:
        engine.update_weights(WeightUpdateMeta(version=5, path=new)).result(20)
        served = stub.model_path
        stub.stop()
        stub.model_path = "what it was started with"
        stub.start()
        before = len(stub.bodies)
        (actual,) = complete(engine, request())
        assert actual.versions == (5,) * 4
        assert stub.model_path == served
        seen = [path for path, _ in stub.bodies[before:]]
        # The first request finds the new process with foreign weights, and its response is not used.
        assert seen.index("/update_weights_from_disk") < len(seen) - 1 - seen[::-1].index("/generate")


def test_second_server_takes_over(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        shorten_wait(backend_of(engine))
        made[0].stop()
        actual = complete(engine, *(request(1, 2, number) for number in range(20)))
        assert [response.stop_reason for response in actual] == ["length"] * 20
        assert len(generations(made[1])) == 20
        wait_for(lambda: made[0].address in str(backend_of(engine).servers[0].failure))
        made[0].start()


def test_when_all_are_gone_requests_fail(tmp_path: Path) -> None:
    with stubs(tmp_path) as made, connected(made, retries=1) as engine:
        shorten_wait(backend_of(engine))
        made[0].stop()
        with pytest.raises(RolloutError, match=made[0].address):
            complete(engine, request())
        wait_for(lambda: backend_of(engine).servers[0].failure)
        with pytest.raises(RolloutError, match="is left"):
            complete(engine, request())
        made[0].start()


def test_equal_prompts_share_a_server(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        for group in range(6):
            complete(engine, *(request(*range(group, group + 20)) for _ in range(4)))
        known = [{tuple(body["input_ids"]) for body in generations(stub)} for stub in made]
        assert sum(map(len, known)) == 6, "no prompt is at both"


def test_destroying_the_engine_ends_requests_with_an_error(stub: Stub) -> None:
    arrived = threading.Event()

    stub.faults["/generate"] = slow(arrived)
    failures: list[BaseException] = []

    def ask(engine: InferenceEngine) -> None:
        try:
            complete(engine, request())
        except CoreRLError as error:
            failures.append(error)

    with connected([stub]) as engine:
        thread = threading.Thread(target=ask, args=(engine,))
        thread.start()
        assert arrived.wait(60)
    thread.join(60)
    assert [type(failure) for failure in failures] == [EngineStateError]


def test_paused_server_is_taken_over(stub: Stub) -> None:
    stub.paused = True
    with connected([stub], start_timeout_s=60.0) as engine:
        assert complete(engine, request())[0].output_ids == (7,) * 4


def test_refused_pause_leaves_no_server_paused(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        made[1].faults["/pause_generation"] = lambda _request, _body: web.Response(status=500)
        with pytest.raises(RolloutError, match=made[1].address):
            engine.pause()
        assert not made[0].paused
        assert [response.stop_reason for response in complete(engine, request(), request(9))] == [
            "length"
        ] * 2
