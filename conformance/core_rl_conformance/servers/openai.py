"""`OpenAIWire`: completions of token ids, with the fields that vLLM and SGLang add to OpenAI's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from core_rl.data.requests import LLMRequest, LLMResponse, StopReason
from core_rl.servers.wire import Scores, Wire, readable

ID_PREFIX = "token_id:"
"""Prefix of a token that is written as its id."""
REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class OpenAIWire(Wire):
    """``POST /v1/completions``. All tokens have version 0: such responses name no weights."""

    path = "/v1/completions"
    ids = "prompt"
    rid = "request_id"

    def __init__(self, model: str) -> None:
        self._model = model
        """The name of the model on the server."""

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        sampling = request.sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        body: dict[str, Any] = {
            "model": self._model,
            "request_id": request.rid,
            "prompt": list(request.input_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            "ignore_eos": True,
            "stop_token_ids": sorted(stops),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        return body

    def adapter_fields(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"model": name}

    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        with readable(response, f"{server} sent a response to request {request.rid}"):
            (choice,) = response["choices"]
            ids = _token_ids(choice)
            logprobs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
            if len(logprobs) != len(ids):
                raise ValueError(f"it has {len(ids)} tokens and {len(logprobs)} log-probs")
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=ids,
                logprobs=logprobs,
                versions=(0,) * len(ids),
                stop_reason=REASONS[choice["finish_reason"]],
            )

    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
            "return_token_ids": True,
        }

    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        with readable(response, f"{server} gave scores"):
            (choice,) = response["choices"]
            positions = choice["prompt_logprobs"][1:]
            logprobs = [
                float(position[str(token)]["logprob"])
                for token, position in zip(ids[1:], positions, strict=True)
            ]
            best = [
                sorted(
                    ((int(token), float(entry["logprob"])) for token, entry in position.items()),
                    key=lambda pair: -pair[1],
                )[:k]
                for position in positions
            ]
            return Scores.checked(logprobs, best, ids, k, server)


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the drawn tokens, from the field of servers that have one, or from tokens written as ids."""
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    return tuple(int(token.removeprefix(ID_PREFIX)) for token in choice["logprobs"]["tokens"])
