"""A stub of an SGLang server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from server_stub import LONGEST, ServerStub, connected_to, engine_of, running
from torch import Tensor

from core_rl.engine.inference import InferenceEngine
from core_rl.errors import WeightsError
from core_rl.weight_sync.distributed import WeightGroup
from core_rl.weight_sync.messages import GroupAddress
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_sglang.backend import SGLangBackend

os.environ["CORE_RL_TEST_SGLANG_KEY"] = "a secret"
API_KEY = "${env:CORE_RL_TEST_SGLANG_KEY}"
"""Model of the server that tests on real servers share."""
GROUP_CALLS = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
)


class Stub(ServerStub):
    """Speaks SGLang's interface."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.info: dict[str, Any] = {}
        """Facts of the server beyond its path, label, ranks and device."""
        self.group: WeightGroup | None = None
        self.broadcast: dict[str, Tensor] = {}
        """Tensors from a process group, by name."""

    def stop(self) -> None:
        super().stop()
        self._leave()

    def _leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def usual(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/flush_cache":
            return web.Response(text="Cache flushed.\n")
        if request.path == "/health" and self.paused:  # a real one waits for a token
            return web.Response(status=503)
        if request.path in GROUP_CALLS:
            return await asyncio.to_thread(self._in_group, request.path, body)
        return web.json_response(self._usual(request.path, body))

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
            return {"model_path": self.model_path, "weight_version": self.label, **self.info}
        if path == "/server_info":
            return {"tp_size": 1, "device": "cpu", **self.info}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/update_weights_from_disk":
            self.model_path = body["model_path"]
            self.label = body.get("weight_version", self.label)
        return self.generated(body) if path == "/generate" else {"success": True, "message": ""}

    def generated(self, body: dict[str, Any]) -> dict[str, Any]:
        """The usual response to a request."""
        count = body["sampling_params"]["max_new_tokens"]
        return {
            "output_ids": [7] * count,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, 7, None]] * count,
                "weight_versions": [{"version": self.label, "start": 0, "end": count}],
            },
        }


def build(model: str, dp: int = 1, lora: dict[str, Any] | None = None, **options: Any) -> InferenceEngine:
    """The engine of ``model``, for real servers; with ``lora`` it takes adapters."""
    return engine_of("sglang", model={"path": model, "lora": lora}, layout={"dp": dp}, options=options)


def backend_of(engine: InferenceEngine) -> SGLangBackend:
    """The backend behind ``engine``."""
    backend = engine._backend
    assert isinstance(backend, SGLangBackend)
    return backend


def tiny_model(root: Path, seed: int = 0) -> str:
    """The directory of a tiny model."""
    return str(ModelStore(root).directory(TinyModel(family="llama", seed=seed, longest=LONGEST)))


@contextmanager
def stubs(root: Path, count: int = 1) -> Iterator[list[Stub]]:
    """A number of stubs that serve one tiny model."""
    with running([Stub(tiny_model(root)) for _ in range(count)]) as made:
        yield made


connected = partial(connected_to, "sglang")


def generations(stub: Stub) -> list[dict[str, Any]]:
    return [body for path, body in stub.bodies if path == "/generate"]
