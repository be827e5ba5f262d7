"""Requests and responses of a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.servers.wire import Scores, Wire, readable, version_of


class PlainWire(Wire):
    """``POST /generate`` and ``POST /score``."""

    path = "/generate"
    scoring_path = "/score"
    rid = "id"

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        sampling = request.sampling
        end_tokens = () if sampling.ignore_eos else eos
        return {
            "ids": list(request.input_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": sorted({*sampling.stop_token_ids, *end_tokens}),
            "seed": sampling.seed,
        }

    def adapter_fields(self, name: str | None) -> dict[str, str]:
        return {}  # without SYNC_LORA there are no adapters

    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        with readable(response, f"{server} sent a response to request {request.rid}"):
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=tuple(response["ids"]),
                logprobs=tuple(map(float, response["logprobs"])),
                versions=tuple(version_of(label, server) for label in response["versions"]),
                stop_reason=response["reason"],
            )

    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {"tokens": list(ids), "best": k}

    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        with readable(response, f"{server} gave scores"):
            return Scores.checked(response["logprobs"], response["best"], ids, k, server)
