"""Helpers for tests of the vLLM engine: a stub of a server, a tiny model, and engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from server_stub import LONGEST, ServerStub, connected_to, engine_of, running

from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_vllm.backend import VllmBackend

HEAD_SIZE = 32
"""The smallest that vLLM's attention on CPUs has."""
GENERATE = "/inference/v1/generate"


class VllmStub(ServerStub):
    """Speaks the interface of vLLM."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.updating = False
        self.release = "0.32.0"
        self.config: dict[str, Any] = {}
        """Its ``model_config``."""
        self.device, self.ranks = "cpu", 1
        self.transfer: dict[str, str] | None = {"backend": "core_rl"}
        """Its ``weight_transfer_config``; a server without core-rl-vllm-server has none, or another."""

    def stop(self) -> None:
        super().stop()
        self.updating = False

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The requests that have come."""
        return [body for path, body in self.bodies if path == GENERATE]

    async def usual(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        match request.path:
            case "/start_weight_update" | "/finish_weight_update":
                begins = request.path == "/start_weight_update"
                if begins == self.updating:
                    return failure("an update is already active" if begins else "without a matching start")
                self.updating = begins
            case "/update_weights" if not self.updating:
                return failure("start_weight_update must be called before update_weights.")
        return web.json_response(self._found(request.path, body))

    def _found(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/weight_info":
                return {"weight_version": self.label}
            case "/get_world_size":
                return {"world_size": self.ranks}
            case "/version":
                return {"version": self.release}
            case "/server_info":
                return {
                    "vllm_config": {
                        "model_config": self.config,
                        "device_config": {"device": self.device},
                        "weight_transfer_config": self.transfer,
                    }
                }
            case "/v1/models":
                return {"data": [{"root": self.model_path}]}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/collective_rpc":
                self.model_path = body["kwargs"]["weights_path"]
            case path if path == GENERATE:
                return {"choices": [self.choice(body)]}
        return {}

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """The usual completion."""
        count = body["sampling_params"]["max_tokens"]
        return {
            "token_ids": [7] * count,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}] * count},
            "weight_versions": [{"version": self.label, "start": 0, "end": count}],
        }


def failure(message: str) -> web.Response:
    """An error as vLLM writes them."""
    return web.json_response({"error": {"message": message, "type": "InternalServerError"}}, status=500)


def failing(message: str) -> Any:
    """A fault: the error with ``message``."""
    return lambda _request, _body: failure(message)


def tiny_model(root: Path, seed: int = 0) -> str:
    """The directory of a tiny model, whose head shares the weights of its embedding."""
    model = TinyModel(family="qwen3", seed=seed, head_size=HEAD_SIZE, longest=LONGEST)
    return str(ModelStore(root).directory(model))


def build(model: str, dp: int = 1, lora: dict[str, Any] | None = None, **options: Any) -> InferenceEngine:
    """The engine of ``model``; with ``lora`` it takes adapters."""
    return engine_of("vllm", model={"path": model, "lora": lora}, layout={"dp": dp}, options=options)


@contextmanager
def stubs(root: Path, count: int = 1) -> Iterator[list[VllmStub]]:
    """A number of stubs that serve one tiny model."""
    with running([VllmStub(tiny_model(root)) for _ in range(count)]) as made:
        yield made


connected = partial(connected_to, "vllm")


def backend_of(engine: InferenceEngine) -> VllmBackend:
    """The backend behind ``engine``."""
    backend = engine._backend
    assert isinstance(backend, VllmBackend)
    return backend
