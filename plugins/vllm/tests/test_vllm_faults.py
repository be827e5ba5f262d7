"""Servers that are gone, slow, dead inside, or have other weights; updates that break off. Servers are stubs here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from server_stub import complete, drop, dying_stream, first, request, slow, wait_for
from vllm_support import GENERATE, VllmStub, connected, failing, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import ConfigError, RolloutError, WeightsError
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.procedures.streaming import tensors_of

DEAD = "EngineCore encountered an issue. See stack trace above"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[VllmStub]:
    with stubs(tmp_path) as made:
        yield made[0]


@pytest.mark.parametrize("fault", [drop, failing(DEAD)], ids=["gone", "dead inside"])
def test_lost_server_gives_single_response(stub: VllmStub, fault: Any) -> None:
    stub.faults[GENERATE] = first(2, fault)
    with connected([stub]) as engine:
        (actual,) = complete(engine, request())
    assert actual.output_ids == (7,) * 4
    names = [body["request_id"] for body in stub.asked]
    assert len(names) == len(set(names)) == 3, "each attempt has a name of its own"


def test_slow_request_is_aborted_by_vllm_id(stub: VllmStub) -> None:
    stub.faults[GENERATE] = slow()
    with connected([stub], request_timeout_s=0.2) as engine:
        with pytest.raises(RolloutError, match=f"{stub.address}.*got no response within 0.2 s"):
            complete(engine, request())
        wait_for(lambda: stub.calls["/abort_requests"] == 1)
    (aborted,) = (body for path, body in stub.bodies if path == "/abort_requests")
    assert aborted == {"request_ids": ["generate-tokens-" + stub.asked[0]["request_id"]]}


def test_a_server_without_routes_for_weights_is_refused(stub: VllmStub) -> None:
    stub.faults["/weight_info"] = lambda _request, _body: web.Response(status=404)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"), connected([stub]):
        pass


def sent(engine: InferenceEngine, model: str, meta: WeightUpdateMeta, *, dies: bool = False) -> None:
    """Update ``engine`` from a trainer with the weights of ``model``, which may die on the way."""
    arrival = engine.update_weights(meta)
    weight_update(meta).send(dying_stream(model) if dies else iter(tensors_of(Path(model)).items()))
    arrival.result(20)


def streamed_update(tmp_path: Path, method: Literal["tensor", "distributed"] = "tensor") -> WeightUpdateMeta:
    return WeightUpdateMeta(method=method, version=3, path=str(tmp_path / "meet"), bucket_bytes=4096)


def test_no_token_is_drawn_during_an_update(stub: VllmStub, tmp_path: Path) -> None:
    with connected([stub]) as engine:
        before = len(stub.bodies)
        sent(engine, tiny_model(tmp_path, seed=1), streamed_update(tmp_path))
        (actual,) = complete(engine, request())
    calls = [path for path, _ in stub.bodies[before:]]
    first_one, *rest, last = (call for call in calls if call != "/update_weights")
    assert (first_one, last) == ("/pause", GENERATE)
    expected = ["/start_weight_update", "/finish_weight_update", "/reset_prefix_cache"]
    assert rest == [*expected, "/update_weight_version", "/resume"]
    buckets = [body["update_info"] for path, body in stub.bodies if path == "/update_weights"]
    names = [name for (bucket,) in buckets for name, *_ in bucket["tensors"]]
    assert sorted(names) == sorted(tensors_of(Path(tiny_model(tmp_path))))
    assert actual.versions == (3,) * 4


def test_interrupted_update_is_undone(stub: VllmStub, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, seed=1)
    with connected([stub]) as engine:
        with pytest.raises(WeightsError, match="the trainer died"):
            sent(engine, model, streamed_update(tmp_path), dies=True)
        wait_for(lambda: not stub.paused)
        assert (stub.updating, stub.model_path, engine.get_version()) == (False, stub.model, 0)
        assert complete(engine, request())[0].versions == (0,) * 4


def test_refused_bucket_undoes_update(stub: VllmStub, tmp_path: Path) -> None:
    def refuse(_request: web.Request, _body: Any) -> web.Response:
        stub.updating = False  # as vLLM does
        return failing("cannot load")(_request, _body)  # type: ignore[no-any-return]

    stub.faults["/update_weights"] = refuse
    with connected([stub]) as engine:
        with pytest.raises(WeightsError, match="cannot load"):
            sent(engine, tiny_model(tmp_path, seed=1), streamed_update(tmp_path))
        assert complete(engine, request())[0].versions == (0,) * 4


def test_abandoned_update_makes_way(stub: VllmStub, tmp_path: Path) -> None:
    stub.updating = True
    with connected([stub]) as engine:
        sent(engine, tiny_model(tmp_path, seed=1), streamed_update(tmp_path))
        assert engine.get_version() == 3
