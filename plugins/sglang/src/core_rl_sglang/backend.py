"""`SGLangBackend`: an inference backend over a fleet of SGLang servers."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import Any

from safetensors.torch import save

from core_rl.data.media import Media
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams, StopReason
from core_rl.distributed.devices import device_type
from core_rl.errors import RolloutError
from core_rl.servers.adapters import ServedModel
from core_rl.servers.backend import ServerBackend
from core_rl.servers.process import ServerProcess
from core_rl.servers.wire import Scores, Wire, readable, versions_of
from core_rl_sglang.config import SglangConfig
from core_rl_sglang.process import served_model, start
from core_rl_sglang.serve import IMAGES
from core_rl_sglang.server import SGLangServer

MOST_LIKELY_ONLY = 1e-9
"""A ``top_p`` that any token reaches by itself."""


class SglangWire(Wire):
    """``POST /generate``."""

    path = "/generate"
    ids = "input_ids"
    rid = "rid"

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        return {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": _sampling(request.sampling, eos),
            "return_logprob": True,
        }

    def adapter_fields(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"lora_path": name}

    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        with readable(response, f"{server} sent a response to request {request.rid}"):
            meta, ids = response["meta_info"], tuple(response["output_ids"])
            finish = meta["finish_reason"]
            aborted = finish["type"] == "abort"
            if aborted and finish.get("status_code"):
                raise RolloutError(f"{server} refused request {request.rid}: {finish.get('message', finish)}")
            if aborted and "weight_versions" not in meta:  # before it began
                ids, meta = (), {"output_token_logprobs": [], "weight_versions": []}
            pairs = meta["output_token_logprobs"]
            versions = versions_of(meta["weight_versions"], len(ids), server)
            if [token for _, token, _ in pairs] != list(ids):
                raise ValueError("its log-probs are of other tokens than its output_ids")
            sampling = request.sampling
            stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
            # A server that ignores EOS ignores stop_token_ids too, and reports "length" where the last token ends it.
            end = next((index + 1 for index, token in enumerate(ids) if token in stops), None)
            reason: StopReason = "abort" if aborted else "length"
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=ids[:end],
                logprobs=tuple(float(logprob) for logprob, _, _ in pairs[:end]),
                versions=versions[:end],
                stop_reason=reason if end is None else "stop",
            )

    def encoded_images(self, media: Media) -> str:
        tensors = save({name: value.contiguous() for name, value in media.items()})
        return IMAGES + base64.b64encode(tensors).decode()

    def image_fields(self, encoded: str, token: int, *, scoring: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"image_data": [encoded]}
        if scoring:
            # SGLang puts a digest of the image in the place of placeholders, and scores that.
            fields["token_ids_logprob"] = [token]
        return fields

    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }

    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        with readable(response, f"{server} gave scores"):
            meta = response["meta_info"]
            # The first token of a sequence has no log-prob.
            logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
            # Log-probs of the placeholder at every position, next to images.
            for place, entries in enumerate((meta.get("input_token_ids_logprobs") or ())[1:], 1):
                logprobs[place - 1] = next(
                    (value for value, token, _ in entries if token == ids[place]), logprobs[place - 1]
                )
            positions = meta["input_top_logprobs"][1:] if k else []
            best = [[(token, value) for value, token, _ in position] for position in positions]
            return Scores.checked(logprobs, best, ids, k, server)


def _sampling(sampling: SamplingParams, eos: Collection[int]) -> dict[str, Any]:
    """All parameters that could otherwise come from the model's generation config."""
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k == 1 and not sampling.greedy:
        # SGLang takes top_k = 1 for greedy decoding, and reports log-probs without the temperature then.
        top_k, top_p = None, MOST_LIKELY_ONLY
    # A server without a tokenizer knows the end tokens of the model's configs alone.
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": top_p,
        "top_k": -1 if top_k is None else top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": 0.0,
        "presence_penalty": sampling.presence_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sorted(stops),
    }
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:
        # Without --enable-deterministic-inference the server ignores it. It has 31 bits.
        parameters["sampling_seed"] = sampling.seed % 2**31
    return parameters


class SGLangBackend(ServerBackend[SglangConfig]):
    """Calls SGLang servers."""

    product = "SGLang"
    wire = SglangWire()
    server_class = SGLangServer

    def served_model(self, config: SglangConfig) -> ServedModel:
        on_cpu = device_type(config.device) == "cpu"
        return served_model(config.model, config.layout.tp if on_cpu else 0)

    def start_server(
        self, config: SglangConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        return start(config, model, port, key)

    def release_memory(self) -> None:
        self.loop.wait(self.fleet.release_memory())

    def resume_memory(self) -> None:
        self.loop.wait(self.fleet.resume_memory())
