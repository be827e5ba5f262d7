"""A server with the routes of vLLM over the reference engine, or over a mutant of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from aiohttp import web
from server_stub import ServerStub

from core_rl.backend.inference_backend import InferenceContext
from core_rl.backend.inference_protocols import SupportsPause
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.errors import CoreRLError
from core_rl.reference import ReferenceRolloutConfig
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl_conformance.servers.routes import CONTROL as CHANGES
from core_rl_conformance.servers.routes import GENERATE as REQUESTS
from core_rl_vllm.wire import PREFIX

COMPLETIONS, GENERATE = REQUESTS["openai"], REQUESTS["vllm"]
PLAIN = ("/openapi.json", "/health", "/version", "/v1/models", COMPLETIONS)
"""Routes that every server has."""
CONTROL = (GENERATE, *CHANGES["vllm"], "/server_info", "/collective_rpc", "/abort_requests")
"""Routes of a server in development mode."""
FIELDS = ("prompt_logprobs", "min_p", "logit_bias", "seed", "stop_token_ids")


class ReferenceServer(ServerStub):
    """Serves ``model_path`` by ``kind``; a request is answered as a whole, by the weights that it began with."""

    def __init__(
        self,
        model_path: str,
        kind: type[ReferenceRolloutBackend] = ReferenceRolloutBackend,
        routes: Collection[str] = CONTROL,
    ) -> None:
        super().__init__(model_path)
        self.routes = (*PLAIN, *routes)
        self._running: dict[str, asyncio.Task[LLMResponse]] = {}
        """Requests that the engine has, by the names that clients abort them by."""
        self.labels = [self.label]
        """Labels by the version that the engine has for them."""
        self.backend = kind()
        config = ReferenceRolloutConfig(model=ModelConfig(path=model_path), device="cpu")
        self.backend.build(InferenceContext(name="reference-rollout", config=config), (), FinetuneSpec())

    def close(self) -> None:
        super().close()
        self.backend.teardown()

    async def usual(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            return web.json_response(await self._content(request, body))
        except CoreRLError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    async def _content(self, request: web.Request, body: dict[str, Any]) -> Any:
        if request.path in (COMPLETIONS, GENERATE):
            return await self._answered(body)
        if request.path == "/collective_rpc":
            await asyncio.to_thread(self.load, body["kwargs"]["weights_path"])
        elif request.path == "/update_weight_version":
            await asyncio.to_thread(self.relabel, body["new_version"])
        elif request.path == "/abort_requests":
            for rid in body["request_ids"]:
                if (task := self._running.get(rid.removeprefix(PREFIX))) is not None:
                    task.cancel()
        elif request.path in ("/pause", "/resume"):
            paused, self.paused = self.paused, request.path == "/pause"
            # The engine's interface pairs them; a client resumes a server that was never paused.
            if isinstance(self.backend, SupportsPause) and paused != self.paused:
                await asyncio.to_thread(self.backend.pause if self.paused else self.backend.resume)
        return self._descriptions().get(request.path, {})

    def _descriptions(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"CompletionRequest": {"properties": {name: {} for name in FIELDS}}}
        config: dict[str, Any] = {"model_config": {}, "device_config": {"device": "cpu"}}
        paths: dict[str, Any] = {path: {} for path in self.routes}
        return {
            "/openapi.json": {"paths": paths, "components": {"schemas": schema}},
            "/version": {"version": "9.9"},
            "/server_info": {"vllm_config": config, "api_key": "hidden"},
            "/v1/models": {"data": [{"id": self.model_path, "root": self.model_path}]},
            "/weight_info": {"weight_version": self.label},
            "/get_world_size": {"world_size": 1},
        }

    def load(self, path: str) -> None:
        """Serve the weights in ``path`` under the label before; raises `CoreRLError` where there are none."""
        self.backend.update_weights(WeightUpdateMeta(version=len(self.labels) - 1, path=path))
        self.model_path = path

    def relabel(self, label: str) -> None:
        """Give the weights ``label``."""
        self.label = label
        self.labels.append(label)
        self.backend.set_version(len(self.labels) - 1)

    def reset(self) -> None:
        """Serve the first weights, as after a start."""
        self.relabel("default")
        self.load(self.model)
        self.paused = False

    async def _answered(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = body.get("sampling_params", body)
        ids = tuple(body.get("token_ids") or body["prompt"])
        if fields.get("prompt_logprobs") is not None:
            scores = await asyncio.to_thread(self._scores, ids, fields["prompt_logprobs"])
            return {"prompt_logprobs": scores, "choices": [{"prompt_logprobs": scores}]}
        await self._resumed()
        rid = body["request_id"]
        asked = LLMRequest(rid=rid, input_ids=ids, sampling=_sampling(fields))
        self._running[rid] = asyncio.ensure_future(self.backend.agenerate(asked))
        try:
            response = await self._running[rid]
        except asyncio.CancelledError:
            raise web.HTTPBadRequest(text="aborted") from None
        finally:
            del self._running[rid]
        await self._resumed()
        label = self.labels[response.versions[0]] if response.versions else self.label
        return {"choices": [_choice(response, label)]}

    async def _resumed(self) -> None:
        while self.paused:
            await asyncio.sleep(0.01)

    def _scores(self, ids: Sequence[int], k: int) -> list[dict[str, Any] | None]:
        batch = SequenceBatch.from_sequences([ids])
        given = self.backend.score(batch, 1.0).tolist()
        top = self.backend.top_logprobs(batch, max(k, 1), 1.0)
        positions: list[dict[str, Any] | None] = [None]
        for place in range(1, len(ids)):
            pairs = list(zip(top.ids[place].tolist(), top.logprobs[place].tolist(), strict=True))[:k]
            positions.append(
                {str(token): {"logprob": value} for token, value in [(ids[place], given[place]), *pairs]}
            )
        return positions


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    top_k = fields["top_k"]
    return SamplingParams(
        max_new_tokens=fields["max_tokens"],
        temperature=fields["temperature"],
        top_p=fields["top_p"],
        top_k=top_k if top_k > 0 else None,
        min_p=fields["min_p"],
        ignore_eos=True,
        stop_token_ids=tuple(fields["stop_token_ids"]),
        seed=fields["seed"],
        logit_bias=tuple((int(token), bias) for token, bias in fields.get("logit_bias", {}).items()),
    )


def _choice(response: LLMResponse, label: str) -> dict[str, Any]:
    """One choice with the fields of both routes."""
    pairs = list(zip(response.output_ids, response.logprobs, strict=True))
    return {
        "token_ids": list(response.output_ids),
        "finish_reason": response.stop_reason,
        "weight_versions": [{"version": label, "start": 0, "end": len(pairs)}],
        "logprobs": {
            "content": [{"token_id": token, "logprob": value} for token, value in pairs],
            "token_logprobs": list(response.logprobs),
        },
    }
