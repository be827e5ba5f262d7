"""Weight updates on several servers: refused, broken off, undone. Servers are stubs here."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from cuda_support import CUDA, OWN, FakeGpu, environment, gpu
from server_stub import complete, drop, dying_stream, first, request
from sglang_support import Stub, connected, stubs, tiny_model

from core_rl import get_spec, load_config, load_engine
from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.config.engine import InferenceEngineConfig
from core_rl.distributed.comm import Comm
from core_rl.engine.sync import sync_weights
from core_rl.errors import RolloutError, WeightsError
from core_rl.servers.server import Server
from core_rl.weight_sync import distributed
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.checks.deltas import DeltaSender, with_few_changes
from core_rl_conformance.procedures.streaming import tensors_of

__all__ = ["gpu"]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with stubs(tmp_path) as made:
        yield made[0]


def streamed(tmp_path: Path, method: SyncMethod) -> WeightUpdateMeta:
    return WeightUpdateMeta(method=method, version=3, path=str(tmp_path / "rendezvous"), bucket_bytes=4096)


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
        assert {v for response in complete(engine, request(), request(9)) for v in response.versions} == {0}


def test_server_death_in_update_recovers_new_weights(tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        made[1].faults["/update_weights_from_disk"] = first(1, drop)
        engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        assert [stub.version for stub in made] == ["3", "3"]
        assert made[0].model_path == made[1].model_path != new, "links, which the trainer cannot replace"


def test_an_update_pauses_and_continues(stub: Stub, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_reach_every_server_in_buckets(tmp_path: Path, count: int) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, count) as made, connected(made) as engine:
        meta = streamed(tmp_path, "tensor")
        arrival = engine.update_weights(meta)
        weight_update(meta).send(iter(tensors.items()))
        arrival.result(20)
        assert engine.get_version() == 3
        for stub in made:
            got = [body for path, body in stub.bodies if path == "/update_weights_from_tensor"]
            loaded = [item for body in got for item in unpickled(body)]
            assert [name for name, _ in loaded] == list(tensors)
            assert all(torch.equal(value, tensors[name]) for name, value in loaded)
            assert len(got) > 5
            assert stub.version == "3"
            assert stub.calls["/flush_cache"] == 1
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"] == 1


@pytest.mark.parametrize("method", ["disk", "tensor", "distributed"])
def test_changes_reach_every_server_as_weights(tmp_path: Path, method: SyncMethod) -> None:
    meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "sync"), delta=True)
    sender = DeltaSender(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        for version in (1, 2, 3):
            if version == 3:
                sender.skip(7)  # servers miss it
                sender.tensors = with_few_changes(sender.tensors, seed=9)
            sync_weights(sender, engine, replace(meta, version=version), 20)
            for stub in made:
                assert stub.version == str(version)
                loaded = loaded_by(stub, method)
                torch.testing.assert_close(loaded, sender.tensors, rtol=0, atol=0)
            sender.tensors = with_few_changes(sender.tensors, seed=version)
        assert sender.full_updates == 2, "the first, and the one after the missed update"
    assert method != "disk" or len(list(tmp_path.glob(".*served-*"))) <= 1, "earlier directories are removed"


def loaded_by(stub: Stub, method: SyncMethod) -> dict[str, torch.Tensor]:
    """The tensors of the last update of ``stub``, which are forgotten."""
    if method == "disk":
        return tensors_of(Path(stub.model_path))
    if method == "distributed":
        return stub.broadcast
    bodies = [body for path, body in stub.bodies if path == "/update_weights_from_tensor"]
    stub.bodies.clear()
    return dict(item for body in bodies for item in unpickled(body))


def unpickled(body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one bucket, as SGLang's ``FlattenedTensorBucket`` makes them."""
    assert body["load_format"] == "flattened_bucket"
    (payload,) = body["serialized_named_tensors"]
    actual = pickle.loads(base64.b64decode(payload))
    flat = actual["flattened_tensor"]
    return [
        (part.name, flat[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape))
        for part in actual["metadata"]
    ]


@pytest.mark.parametrize("method", ["tensor", "distributed"])
def test_interrupted_stream_restores_old_weights(tmp_path: Path, method: SyncMethod) -> None:
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        meta = streamed(tmp_path, method)
        arrival = engine.update_weights(meta)
        with pytest.raises(WeightsError, match="the trainer died"):
            weight_update(meta).send(dying_stream(tiny_model(tmp_path, seed=1)))
        with pytest.raises(WeightsError):
            arrival.result(20)
        assert engine.get_version() == 0
        for stub in made:
            assert stub.version == "0"
            assert stub.group is None
            assert "/update_weight_version" in [path for path, _ in stub.bodies[-2:]]
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"]
            assert stub.calls["/update_weights_from_disk"] == 1, "the weights before the update"


def test_connection_lost_at_pause_resumes_servers(stub: Stub, tmp_path: Path) -> None:
    def pause_and_drop(request: web.Request, body: Any) -> None:
        stub.paused = True
        drop(request, body)

    new = tiny_model(tmp_path, seed=1)
    stub.faults["/pause_generation"] = first(1, pause_and_drop)
    with connected([stub], start_timeout_s=60.0) as engine:
        engine.pause()
        engine.update_weights(WeightUpdateMeta(version=2, path=new)).result(20)
        assert stub.paused
        engine.resume()
        assert complete(engine, request())[0].versions == (2,) * 4
        assert not stub.paused


def require_broadcast(stub: Stub, tensors: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(stub.broadcast, tensors, rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 2])
def test_broadcast_reaches_late_server(tmp_path: Path, count: int) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, count) as made, connected(made) as engine:
        meta = streamed(tmp_path, "distributed")
        arrival = engine.update_weights(meta)
        weight_update(meta).send(iter(tensors.items()))
        arrival.result(20)
        for stub in made:
            require_broadcast(stub, tensors)
            assert stub.version == "3"
            assert stub.calls["/begin_weight_update"] == stub.calls["/end_weight_update"] == 1
            assert stub.group is None, "it has left"
        made[0].stop()
        made[0].broadcast = {}
        made[0].start()
        complete(engine, *(request(1, number) for number in range(8)))
        engine.set_version(3)  # waits for servers on their way back
        if made[0].calls["/init_weights_update_group"] > 1:
            require_broadcast(made[0], tensors)


def test_server_death_in_broadcast_blocks_no_peer(tmp_path: Path) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        meta = streamed(tmp_path, "distributed")

        def die(request: web.Request, body: Any) -> None:
            made[1]._leave()
            drop(request, body)

        made[1].faults["/update_weights_from_distributed"] = first(1, die)
        arrival = engine.update_weights(meta)
        weight_update(meta).send(iter(tensors.items()))
        arrival.result(30)
        assert engine.get_version() == 3
        for stub in made:
            require_broadcast(stub, tensors)
            assert stub.version == "3"


def test_failed_recovery_ends_wait(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    with connected([stub], retries=1) as engine:
        meta = streamed(tmp_path, "distributed")
        arrival = engine.update_weights(meta)
        weight_update(meta).send(iter(tensors.items()))
        arrival.result(20)
        stub.stop()
        monkeypatch.setattr(distributed, "JOIN_S", 0.2)
        stub.faults["/init_weights_update_group"] = lambda _request, _body: web.json_response({})
        stub.start()
        with pytest.raises(RolloutError, match=r"none of the SGLang servers .* is left: .*did not join"):
            asyncio.run(asyncio.wait_for(engine.agenerate(request()), 30))


def paths(stub: Stub, start: int) -> list[str]:
    """The calls from the number ``start`` on."""
    return [path for path, _ in stub.bodies[start:]]


def versions(stub: Stub, start: int) -> list[str]:
    """The versions that it was given from the call with the number ``start`` on."""
    labels = [body.get("new_version", body.get("weight_version")) for _, body in stub.bodies[start:]]
    return [label.rpartition(":")[2] for label in labels if label is not None]


def refuse(_request: web.Request, _body: dict[str, Any]) -> web.Response:
    return web.json_response({"success": False, "message": "no memory"}, status=400)


LOAD = ["/pause_generation", "/update_weights_from_disk", "/update_weight_version"]


def test_no_server_computes_while_an_update_is_undone(tmp_path: Path) -> None:
    """Neither the server with the new weights, nor the server that refused them."""
    new = tiny_model(tmp_path, seed=1)
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        before = [len(stub.bodies) for stub in made]
        made[1].faults["/update_weights_from_disk"] = first(1, refuse)
        with pytest.raises(WeightsError, match="no memory"):
            engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        for stub, start in zip(made, before, strict=True):
            assert paths(stub, start) == [*LOAD[:2], *LOAD, "/continue_generation"]
            assert versions(stub, start) == ["0"], "the refused version never existed"


def test_receiving_server_ignores_resume(stub: Stub, tmp_path: Path) -> None:
    receiving, resumed = threading.Event(), threading.Event()

    async def slow(_request: web.Request, _body: Any) -> None:
        receiving.set()
        await asyncio.to_thread(resumed.wait, 10)

    with connected([stub]) as engine:
        engine.pause()
        before = len(stub.bodies)
        stub.faults["/update_weights_from_disk"] = slow
        update = engine.update_weights(WeightUpdateMeta(version=3, path=tiny_model(tmp_path, seed=1)))
        assert receiving.wait(60)
        engine.resume()
        assert paths(stub, before) == LOAD[:2]
        resumed.set()
        update.result(20)
        assert paths(stub, before) == [*LOAD, "/continue_generation"]
        assert complete(engine, request())[0].versions == (3,) * 4


def test_unrestored_server_waits_for_weights(stub: Stub, tmp_path: Path) -> None:
    """The refused update and its undoing both fail; only the recovery succeeds."""
    new = tiny_model(tmp_path, seed=1)
    with connected([stub]) as engine:
        before = len(stub.bodies)
        stub.faults["/update_weights_from_disk"] = first(2, refuse)
        with pytest.raises(WeightsError, match="no memory"):
            engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        assert complete(engine, request())[0].versions == (0,) * 4
    seen = paths(stub, before)
    assert "/health" not in seen
    assert seen.index("/continue_generation") > len(seen) - seen[::-1].index("/update_weights_from_disk") - 1
    assert seen.index("/continue_generation") > len(seen) - seen[::-1].index("/update_weight_version") - 1


def test_unrestored_server_ends_its_requests(stub: Stub, tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with connected([stub]) as engine:
        stub.faults["/update_weights_from_disk"] = refuse
        with pytest.raises(WeightsError, match="no memory"):
            engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        with pytest.raises(RolloutError, match="is left"):
            complete(engine, request())
    modes = [body["mode"] for path, body in stub.bodies if path == "/pause_generation"]
    assert modes[-1] == "abort"
    assert stub.paused


def test_late_servers_read_bucket_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    """The second server is lost after some buckets, when the trainer's buffers are gone."""
    tensors = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    monkeypatch.setattr(Server, "cuda", lambda self: environment())
    actual: dict[str, list[tuple[str, torch.Tensor]]] = {"opened": [], "shared": []}

    def load(server: int, body: dict[str, Any]) -> None:
        (payload,) = body["serialized_named_tensors"]
        bucket = unpickled(body)
        if server == 1:
            actual["opened" if OWN.encode() in base64.b64decode(payload) else "shared"] += bucket

    with stubs(tmp_path, 2) as made, connected(made) as engine:

        def lost_at_the_third(request: web.Request, body: dict[str, Any]) -> None:
            if made[1].calls["/update_weights_from_tensor"] == 3:
                drop(request, body)
            else:
                load(1, body)

        made[0].faults["/update_weights_from_tensor"] = lambda _, body: load(0, body)
        made[1].faults["/update_weights_from_tensor"] = lost_at_the_third
        meta = streamed(tmp_path, "tensor")
        arrival = engine.update_weights(meta)
        weight_update(meta).send(iter(tensors.items()), device=CUDA)
        arrival.result(20)
        assert [stub.version for stub in made] == ["3", "3"]
    assert gpu.alive == 0
    opened = [name for name, _ in actual["opened"]]
    assert 0 < len(opened) < len(tensors)
    assert opened == list(tensors)[: len(opened)]
    assert [name for name, _ in actual["shared"]] == list(tensors), "all of them again, when it is back"
    for name, value in (*actual["opened"], *actual["shared"]):
        assert torch.equal(value, tensors[name])


@pytest.mark.parametrize("engine", ["sglang", "reference-rollout"])
def test_verified_files_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    new, path, hashed = Path(tiny_model(tmp_path, seed=1)), tmp_path / "weights", list[str]()
    digest = hashlib.file_digest

    def counted(stream: Any, name: str) -> Any:
        hashed.append(stream.name)
        return digest(stream, name)

    def write(directory: Path) -> None:
        shutil.copytree(new, directory, dirs_exist_ok=True)

    write_checkpoint(str(path), write, Comm(), kind="hf")
    with stubs(tmp_path) as made, ExitStack() as stack:
        if engine == "sglang":
            receiver = stack.enter_context(connected(made))
        else:
            config = load_config(engine)(model={"path": made[0].model}, device="cpu")
            assert isinstance(config, InferenceEngineConfig)
            receiver = load_engine(get_spec(engine), config)
            receiver.initialize()
            stack.callback(receiver.destroy)
        monkeypatch.setattr("hashlib.file_digest", counted)
        receiver.update_weights(WeightUpdateMeta(version=1, path=str(path))).result(20)
        assert not hashed
        receiver.update_weights(WeightUpdateMeta(version=2, path=str(path), verify=True)).result(20)
        assert any(name.endswith(".safetensors") for name in hashed)


def test_memory_resume_restores_weights(tmp_path: Path) -> None:
    new = tiny_model(tmp_path, seed=1)
    with stubs(tmp_path, 2) as made, connected(made) as engine:
        engine.update_weights(WeightUpdateMeta(version=3, path=new)).result(20)
        before = [len(stub.bodies) for stub in made]
        engine.release_memory()
        engine.resume_memory()
        for stub, start in zip(made, before, strict=True):
            calls = [path for path, _ in stub.bodies[start:]]
            assert calls[:2] == ["/release_memory_occupation", "/resume_memory_occupation"]
            assert "/update_weights_from_disk" in calls
        assert complete(engine, request())[0].versions == (3,) * 4
