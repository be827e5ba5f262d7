"""Requests in vLLM's format, and its responses in the core's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams, StopReason
from core_rl.servers.api import Refused
from core_rl.servers.wire import Scores, Wire, readable, versions_of

PREFIX = "generate-tokens-"
"""Prefix of vLLM's names of requests."""
NO_LOGPROB = -9999.0
"""Value of vLLM for a log-prob that is not a number."""
LOWEST = 2e-5
"""The lowest temperature: vLLM draws the most likely token below half of it, and reports it untempered. No log-prob in
float32 differs from lower temperatures, except for tokens of almost equal logits."""
DEAD = ("EngineCore encountered an issue", "EngineDeadError")
"""In responses of a server whose engine has ended."""


class VllmWire(Wire):
    """``POST /inference/v1/generate``."""

    path = "/inference/v1/generate"
    rid = "request_id"

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        return {"token_ids": list(request.input_ids), "sampling_params": _sampling(request.sampling, eos)}

    def adapter_fields(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"model": name}

    def is_lost(self, error: Refused) -> bool:
        return any(part in str(error) for part in DEAD)

    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        with readable(response, f"{server} sent a response to request {request.rid}"):
            (choice,) = response["choices"]
            ids, entries = tuple(choice["token_ids"]), choice["logprobs"]["content"]
            if [entry["token_id"] for entry in entries] != list(ids):
                raise ValueError("its log-probs are of other tokens than its token_ids")
            logprobs = tuple(float(entry["logprob"]) for entry in entries)
            if any(logprob <= NO_LOGPROB for logprob in logprobs):
                raise ValueError("a log-prob is not a number")
            reasons: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=ids,
                logprobs=logprobs,
                versions=versions_of(choice["weight_versions"] or [], len(ids), server),
                stop_reason=reasons[choice["finish_reason"]],
            )

    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k, "detokenize": False}
        return {"token_ids": list(ids), "sampling_params": sampling}

    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        with readable(response, f"{server} gave scores"):
            return Scores.of_tokens(response["prompt_logprobs"][1:], ids, k, server)


def _sampling(sampling: SamplingParams, eos: Collection[int]) -> dict[str, Any]:
    """All parameters, whose defaults could otherwise be the model's."""
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else max(sampling.temperature, LOWEST),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": 0.0,
        # A server without a tokenizer does not know the model's own.
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "seed": sampling.seed,
        "logprobs": 0,
        "detokenize": False,
    }
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return parameters
