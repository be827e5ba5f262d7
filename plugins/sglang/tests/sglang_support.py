"""A stub of an SGLang server with scripted responses, for faults that a real one shows too rarely."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from core_rl import get_spec, load_config, load_engine
from core_rl.config.base import parse_config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import WeightsError
from core_rl.weight_sync.group import GroupAddress, WeightGroup
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.procedures.streaming import tensors_of
from core_rl_sglang.backend import SGLangBackend

os.environ["CORE_RL_TEST_SGLANG_KEY"] = "a secret"
API_KEY = "${env:CORE_RL_TEST_SGLANG_KEY}"
"""Of the server that tests on real ones share."""
ADAPTERS: dict[str, Any] = {
    "rank": 3,
    "alpha": 7,
    "rslora": True,
    "target_modules": ["k_proj", "up_proj", "o_proj"],
}
"""Of the server that takes some: on layers that SGLang fuses with others which have none."""
GROUP_CALLS = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
)

Handler = Callable[[web.Request, dict[str, Any]], Any]


class Stub:
    """Speaks SGLang's interface on a free port: each new token is 7, and updates succeed.

    ``faults`` maps a path to a function that runs instead of the usual response; it returns the response, and
    None is the usual one.
    """

    def __init__(self, model_path: str) -> None:
        self.model = self.model_path = model_path
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, Handler] = {}
        self.version = "default"
        self.paused = self.hold = False
        self.group: WeightGroup | None = None
        self.broadcast: dict[str, Tensor] = {}
        """What came by a process group, by name."""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; on the same port as before after `stop`."""
        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    def stop(self) -> None:
        """Close the port and all connections, as if the process had been killed; a new one knows nothing."""
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self.version, self.paused = "default", False
        self._leave()

    def _leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.calls[request.path] += 1
        self.bodies.append((request.path, body))
        fault = self.faults.get(request.path)
        if fault is not None:
            found = fault(request, body)
            found = await found if asyncio.iscoroutine(found) else found
            if found is not None:
                return found  # type: ignore[no-any-return]
        if request.path == "/flush_cache":
            return web.Response(text="Cache flushed.\n")
        if request.path == "/health" and self.paused:  # a real one waits for a token
            return web.Response(status=503)
        if request.path in GROUP_CALLS:
            return await asyncio.to_thread(self._in_group, request.path, body)
        if body.get("stream"):
            return await self._streamed(request, body)
        return web.json_response(self._usual(request.path, body))

    async def _streamed(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The usual response token by token, then as a whole; waits before the last token while ``hold`` is set."""
        whole = self.generated(body)
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, len(whole["output_ids"])):
            pairs = whole["meta_info"]["output_token_logprobs"][:count]
            event = {"meta_info": {"finish_reason": None, "output_token_logprobs": pairs}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        while self.hold:
            await asyncio.sleep(0.01)
        await response.write(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode())
        return response

    def _in_group(self, path: str, body: dict[str, Any]) -> web.Response:
        try:
            if path == "/init_weights_update_group":
                address = GroupAddress(
                    host=body["master_address"],
                    port=body["master_port"],
                    world_size=body["world_size"],
                    name=body["group_name"],
                    backend=body["backend"],
                )
                self.group = WeightGroup.join(address, body["rank_offset"], torch.device("cpu"))
            elif path == "/destroy_weights_update_group":
                self._leave()
            else:
                self._receive(body)
        except WeightsError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})

    def _receive(self, body: dict[str, Any]) -> None:
        if self.group is None:
            raise WeightsError("there is no group")
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.broadcast[name] = self.group.broadcast(tensor)

    def _usual(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/model_info":
            return {"model_path": self.model_path, "weight_version": self.version}
        if path == "/server_info":
            return {"tp_size": 1, "device": "cpu"}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/update_weights_from_disk":
            self.model_path = body["model_path"]
            self.version = body.get("weight_version", self.version)
        return self.generated(body) if path == "/generate" else {"success": True, "message": ""}

    def generated(self, body: dict[str, Any]) -> dict[str, Any]:
        """The usual response to a request."""
        count = body["sampling_params"]["max_new_tokens"]
        return {
            "output_ids": [7] * count,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, 7, None]] * count,
                "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            },
        }


def drop(request: web.Request, body: dict[str, Any]) -> None:
    """Close the connection without a response."""
    assert request.transport is not None
    request.transport.abort()


def first(times: int, fault: Handler) -> Handler:
    """``fault`` for the first ``times`` calls, and the usual response after them."""
    left = [times]

    def sometimes(request: web.Request, body: dict[str, Any]) -> Any:
        left[0] -= 1
        return fault(request, body) if left[0] >= 0 else None

    return sometimes


def build(model: str, dp: int = 1, lora: dict[str, Any] | None = None, **options: Any) -> InferenceEngine:
    """The engine of ``model``, for real servers; with ``lora`` it takes adapters."""
    spec = get_spec("sglang")
    section = {"path": model, "lora": lora}
    values = {"model": section, "layout": {"dp": dp}, "device": "cpu", "options": options}
    config = parse_config(load_config(spec), values)
    assert isinstance(config, InferenceEngineConfig)
    return load_engine(spec, config)


def backend_of(engine: InferenceEngine) -> SGLangBackend:
    """The backend behind ``engine``."""
    backend = engine._backend
    assert isinstance(backend, SGLangBackend)
    return backend


def tiny_model(root: Path, seed: int = 0) -> str:
    """The directory of a tiny model."""
    return str(ModelStore(root).directory(TinyModel(family="llama", seed=seed)))


def dying_stream(model: str) -> Iterator[tuple[str, Tensor]]:
    """The first weights of ``model``; then the trainer dies."""
    yield from list(tensors_of(Path(model)).items())[:6]
    raise WeightsError("the trainer died")


@contextmanager
def stubs(root: Path, count: int = 1) -> Iterator[list[Stub]]:
    """A number of stubs that serve one tiny model."""
    made = [Stub(tiny_model(root)) for _ in range(count)]
    for stub in made:
        stub.start()
    try:
        yield made
    finally:
        for stub in made:
            stub.close()


@contextmanager
def connected(
    made: list[Stub], lora: dict[str, Any] | None = None, **options: Any
) -> Iterator[InferenceEngine]:
    """The engine at these servers; with ``lora`` it takes adapters."""
    spec = get_spec("sglang")
    values = {
        "model": {"path": made[0].model, "lora": lora},
        "layout": {"dp": len(made)},
        "device": "cpu",
        "options": {"addresses": [stub.address for stub in made], **options},
    }
    config = parse_config(load_config(spec), values)
    assert isinstance(config, InferenceEngineConfig)
    engine = load_engine(spec, config)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.destroy()


def request(*ids: int, **sampling: Any) -> LLMRequest:
    return LLMRequest(
        input_ids=ids or (1, 2, 3),
        sampling=SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **sampling}),
    )


def complete(engine: InferenceEngine, *requests: LLMRequest) -> list[LLMResponse]:
    async def all_of_them() -> list[LLMResponse]:
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(all_of_them())


def generations(stub: Stub) -> list[dict[str, Any]]:
    return [body for path, body in stub.bodies if path == "/generate"]


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
