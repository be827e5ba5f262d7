"""What the engine does when a server is missing, slow, gone, or talks nonsense. Servers are stubs here."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from sglang_support import Stub, backend_of, connected, drop, dying_stream, first, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.requests import LLMRequest, LLMResponse, PartialResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CoreRLError, EngineStateError, RolloutError, WeightsError
from core_rl.weight_sync.sender import send_tensors
from core_rl_conformance.procedures.streaming import tensors_of


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with stubs(tmp_path) as made:
        yield made[0]


def request(*ids: int, **sampling: Any) -> LLMRequest:
    return LLMRequest(
        input_ids=ids or (1, 2, 3),
        sampling=SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **sampling}),
    )


def answer(engine: InferenceEngine, *requests: LLMRequest) -> list[LLMResponse]:
    async def all_of_them() -> list[LLMResponse]:
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(all_of_them())


def generations(stub: Stub) -> list[dict[str, Any]]:
    return [body for path, body in stub.bodies if path == "/generate"]


def test_a_broken_connection_is_asked_again_and_gives_one_answer(stub: Stub) -> None:
    stub.faults["/generate"] = first(2, drop)
    with connected([stub]) as engine:
        (found,) = answer(engine, request())
    assert found.output_ids == (7,) * 4
    asked = [body["rid"] for body in generations(stub)]
    assert len(asked) == len(set(asked)) == 3, "each attempt has a name of its own"


def test_attempts_end(stub: Stub) -> None:
    stub.faults["/generate"] = drop
    with connected([stub], retries=2) as engine, pytest.raises(RolloutError, match=stub.address):
        answer(engine, request())
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
    ids=["500", "no json", "other json", "a list", "half an answer"],
)
def test_nonsense_is_an_error_that_names_the_server(stub: Stub, reply: Any, says: str) -> None:
    stub.faults["/generate"] = reply
    with connected([stub]) as engine:
        with pytest.raises(RolloutError) as caught:
            answer(engine, request())
        assert says in str(caught.value)
        assert stub.address in str(caught.value)
        stub.faults.clear()
        assert answer(engine, request())[0].output_ids == (7,) * 4, "the engine goes on"


def test_a_slow_server_is_given_up_and_told_so(stub: Stub) -> None:
    async def slow(_request: web.Request, _body: Any) -> None:
        await asyncio.sleep(5)

    stub.faults["/generate"] = slow
    with connected([stub], request_timeout_s=0.2) as engine:
        with pytest.raises(RolloutError, match=f"{stub.address}.*not answered within 0.2 s"):
            answer(engine, request())
        wait_for(lambda: stub.calls["/abort_request"] == 1)


def test_a_cancelled_request_is_aborted_by_its_name(stub: Stub) -> None:
    arrived = threading.Event()

    async def slow(_request: web.Request, _body: Any) -> None:
        arrived.set()
        await asyncio.sleep(5)

    async def give_up(engine: InferenceEngine) -> None:
        task = asyncio.ensure_future(engine.agenerate(request()))
        await asyncio.to_thread(arrived.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stub.faults["/generate"] = slow
    with connected([stub]) as engine:
        asyncio.run(give_up(engine))
        wait_for(lambda: stub.calls["/abort_request"] == 1)
    aborted = next(body for path, body in stub.bodies if path == "/abort_request")
    assert aborted == {"rid": generations(stub)[0]["rid"]}


def test_foreign_ids_and_long_prompts_never_reach_the_server(stub: Stub) -> None:
    with connected([stub]) as engine:
        for wrong in (request(1, 151), request(*range(62)), request(1, stop_token_ids=(500,))):
            with pytest.raises(RolloutError):
                answer(engine, wrong)
    assert not stub.calls["/generate"]


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    with stubs(tmp_path) as made:
        made[0].stop()
        missing = pytest.raises(RolloutError, match=f"{made[0].address} is not ready after 0.5 s")
        with missing, connected(made, start_timeout_s=0.5):
            pass
        made[0].start()


def test_a_server_that_comes_back_gets_the_weights_before_it_serves(stub: Stub, tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with connected([stub]) as engine:
        engine.update_weights(WeightUpdateMeta(version=5, path=new)).result(20)
        served = stub.model_path
        stub.stop()
        stub.model_path = "what it was started with"
        stub.start()
        before = len(stub.bodies)
        (found,) = answer(engine, request())
        assert found.versions == (5,) * 4
        assert stub.model_path == served
        seen = [path for path, _ in stub.bodies[before:]]
        # The first request finds the new process with foreign weights, and its answer is not taken.
        assert seen.index("/update_weights_from_disk") < len(seen) - 1 - seen[::-1].index("/generate")


def test_the_other_server_takes_over(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made, start_timeout_s=1.0) as engine:
        made[0].stop()
        found = answer(engine, *(request(1, 2, number) for number in range(20)))
        assert [response.stop_reason for response in found] == ["length"] * 20
        assert len(generations(made[1])) == 20
        wait_for(lambda: made[0].address in str(backend_of(engine).servers[0].failure))
        made[0].start()


def test_when_all_are_gone_requests_fail(tmp_path: Path) -> None:
    with stubs(tmp_path) as made, connected(made, start_timeout_s=0.5, retries=1) as engine:
        made[0].stop()
        with pytest.raises(RolloutError, match=made[0].address):
            answer(engine, request())
        with pytest.raises(RolloutError, match="is left"):
            answer(engine, request())
        made[0].start()


def test_equal_prompts_meet_in_one_server(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        for group in range(6):
            answer(engine, *(request(*range(group, group + 20)) for _ in range(4)))
        known = [{tuple(body["input_ids"]) for body in generations(stub)} for stub in made]
        assert sum(map(len, known)) == 6, "no prompt is at both"


def test_a_refused_update_leaves_weights_and_version(tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        old = made[0].model_path
        made[1].faults["/update_weights_from_disk"] = first(
            1, lambda r, b: web.json_response({"success": False, "message": "no room"}, status=400)
        )
        with pytest.raises(WeightsError, match=f"{made[1].address}.*no room"):
            engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        assert engine.get_version() == 0
        assert [stub.model_path for stub in made] == [old, old], "also where it had succeeded"
        assert {v for response in answer(engine, request(), request(9)) for v in response.versions} == {0}


def test_a_server_that_dies_in_an_update_comes_back_with_the_new_weights(tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        made[1].faults["/update_weights_from_disk"] = first(1, drop)
        engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        assert [stub.version for stub in made] == ["3", "3"]
        assert made[0].model_path == made[1].model_path != new, "links, which the trainer cannot replace"


def test_an_update_pauses_and_goes_on(stub: Stub, tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    for in_flight, mode in (("continue", "retract"), ("abort", "abort")):
        with connected([stub], in_flight=in_flight) as engine:
            before = len(stub.bodies)
            engine.update_weights(WeightUpdateMeta(version=1, path=new)).result(20)
        seen = stub.bodies[before:]
        assert [path for path, _ in seen] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert seen[0][1] == {"mode": mode}


def test_destroying_the_engine_ends_requests_with_an_error(stub: Stub) -> None:
    arrived = threading.Event()

    async def slow(_request: web.Request, _body: Any) -> None:
        arrived.set()
        await asyncio.sleep(5)

    stub.faults["/generate"] = slow
    failures: list[BaseException] = []

    def ask(engine: InferenceEngine) -> None:
        try:
            answer(engine, request())
        except CoreRLError as error:
            failures.append(error)

    with connected([stub]) as engine:
        thread = threading.Thread(target=ask, args=(engine,))
        thread.start()
        arrived.wait(5)
    thread.join(5)
    assert [type(failure) for failure in failures] == [EngineStateError]


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_reach_every_server_in_buckets(tmp_path: Path, count: int) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, count) as made, connected(made) as engine:
        meta = WeightUpdateMeta(method="tensor", version=3, path=str(tmp_path / "meet"), bucket_bytes=4096)
        arrival = engine.update_weights(meta)
        send_tensors(iter(tensors.items()), meta)
        arrival.result(20)
        assert engine.get_version() == 3
        for stub in made:
            got = [body for path, body in stub.bodies if path == "/update_weights_from_tensor"]
            names = [name for body in got for name, _ in unpickled(body)]
            assert names == list(tensors)
            assert len(got) > 5
            assert stub.version == "3"
            assert stub.calls["/flush_cache"] == 1
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"] == 1


def unpickled(body: dict[str, Any]) -> Any:
    return pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))


def test_a_sender_that_breaks_off_is_told_of(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        meta = WeightUpdateMeta(method="tensor", version=3, path=str(tmp_path / "meet"), bucket_bytes=4096)
        arrival = engine.update_weights(meta)
        with pytest.raises(WeightsError, match="the trainer died"):
            send_tensors(dying_stream(tiny_model(tmp_path, seed=1)), meta)
        with pytest.raises(WeightsError):
            arrival.result(20)
        assert engine.get_version() == 0
        for stub in made:
            assert stub.version == "0"
            assert stub.bodies[-2][0] == "/update_weight_version"
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"]
            assert stub.calls["/update_weights_from_disk"] == 1, "the weights of before"


def test_a_server_that_somebody_left_paused_is_taken_over(stub: Stub) -> None:
    stub.paused = True
    with connected([stub], start_timeout_s=2.0) as engine:
        assert answer(engine, request())[0].output_ids == (7,) * 4


def test_a_connection_that_breaks_at_a_pause_leaves_nobody_paused(stub: Stub, tmp_path: Path) -> None:
    def pause_and_drop(request: web.Request, body: Any) -> None:
        stub.paused = True
        drop(request, body)

    new = tiny_model(tmp_path, seed=1)
    stub.faults["/pause_generation"] = first(1, pause_and_drop)
    with connected([stub], start_timeout_s=2.0) as engine:
        engine.pause()
        engine.update_weights(WeightUpdateMeta(version=2, path=new)).result(20)
        assert stub.paused
        engine.resume()
        assert answer(engine, request())[0].versions == (2,) * 4
        assert not stub.paused


def grouped(tmp_path: Path, version: int = 3) -> WeightUpdateMeta:
    point = str(tmp_path / "meet")
    return WeightUpdateMeta(method="distributed", version=version, path=point, bucket_bytes=4096)


def require_broadcast(stub: Stub, tensors: dict[str, torch.Tensor]) -> None:
    assert stub.broadcast.keys() == tensors.keys()
    assert all(torch.equal(stub.broadcast[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("count", [1, 2])
def test_a_group_reaches_every_server_and_a_later_one(tmp_path: Path, count: int) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, count) as made, connected(made) as engine:
        meta = grouped(tmp_path)
        arrival = engine.update_weights(meta)
        send_tensors(iter(tensors.items()), meta)
        arrival.result(20)
        for stub in made:
            require_broadcast(stub, tensors)
            assert stub.version == "3"
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"] == 1
            assert stub.group is None, "it has left"
        made[0].stop()
        made[0].broadcast = {}
        made[0].start()
        answer(engine, *(request(1, number) for number in range(8)))
        engine.set_version(3)  # waits for servers on their way back
        if made[0].calls["/init_weights_update_group"] > 1:
            require_broadcast(made[0], tensors)


def test_a_server_that_dies_in_a_group_holds_up_nobody(tmp_path: Path) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        meta = grouped(tmp_path)

        def die(request: web.Request, body: Any) -> None:
            made[1]._leave()
            drop(request, body)

        made[1].faults["/update_weights_from_distributed"] = first(1, die)
        arrival = engine.update_weights(meta)
        send_tensors(iter(tensors.items()), meta)
        arrival.result(30)
        assert engine.get_version() == 3
        for stub in made:
            require_broadcast(stub, tensors)
            assert stub.version == "3"


def test_a_sender_that_breaks_off_in_a_group_is_told_of(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        meta = grouped(tmp_path)
        arrival = engine.update_weights(meta)
        with pytest.raises(WeightsError, match="the trainer died"):
            send_tensors(dying_stream(tiny_model(tmp_path, seed=1)), meta)
        with pytest.raises(WeightsError):
            arrival.result(20)
        assert engine.get_version() == 0
        for stub in made:
            assert stub.version == "0"
            assert stub.group is None
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"]
            assert stub.calls["/update_weights_from_disk"] == 1, "the weights of before"


async def streamed(engine: InferenceEngine, count: int | None = None) -> list[PartialResponse | LLMResponse]:
    """What a streamed answer consists of, or its first ``count`` parts."""
    found: list[PartialResponse | LLMResponse] = []
    async with aclosing(engine.astream(request(max_new_tokens=9))) as parts:
        async for part in parts:
            found.append(part)
            if len(found) == count:
                break
    return found


def test_a_streamed_answer_comes_in_pieces_and_as_a_whole(stub: Stub) -> None:
    stub.faults["/generate"] = first(1, drop)
    with connected([stub]) as engine:
        *pieces, answer = asyncio.run(streamed(engine))
    assert isinstance(answer, LLMResponse)
    assert answer.output_ids == (7,) * 9
    assert [piece.output_ids for piece in pieces] == [(7,)] * 8
    assert [piece.logprobs for piece in pieces] == [(-0.5,)] * 8


def test_a_stream_that_is_closed_is_aborted(stub: Stub) -> None:
    stub.hold = True
    with connected([stub]) as engine:
        assert len(asyncio.run(streamed(engine, 3))) == 3
        wait_for(lambda: stub.calls["/abort_request"] == 1)
        stub.hold = False
    aborted = next(body for path, body in stub.bodies if path == "/abort_request")
    assert aborted == {"rid": generations(stub)[0]["rid"]}


@pytest.mark.parametrize("event", [b"data: 1\n\n", b"data: {\n\n", b""])
def test_a_stream_of_nonsense_is_an_error(stub: Stub, event: bytes) -> None:
    stub.faults["/generate"] = lambda _request, _body: web.Response(body=event)
    with connected([stub], retries=0) as engine, pytest.raises(RolloutError, match=stub.address):
        asyncio.run(streamed(engine))
