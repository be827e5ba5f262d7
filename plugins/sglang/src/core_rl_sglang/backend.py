"""`SGLangBackend`: an inference backend over a fleet of SGLang servers."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from safetensors.torch import save
from torch import Tensor

from core_rl.data.media import Media
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams, StopReason
from core_rl.distributed.devices import device_type
from core_rl.errors import RolloutError
from core_rl.servers.adapters import ServedAdapter, ServedModel
from core_rl.servers.api import Refused
from core_rl.servers.backend import ServerBackend
from core_rl.servers.config import Interrupt
from core_rl.servers.facts import ServerFacts, ServerLimits
from core_rl.servers.process import ServerProcess
from core_rl.servers.server import PROBE_TIMEOUT_S, Server
from core_rl.servers.wire import Scores, Wire, readable, versions_of
from core_rl.weight_sync.buckets import flat_bytes, start_of
from core_rl.weight_sync.cuda import DeviceMemory, Opened
from core_rl.weight_sync.messages import Bucket, GroupAddress, pickled_by_name
from core_rl_sglang.process import SglangConfig, served_model, start
from core_rl_sglang.serve import IMAGES

DTYPES: Mapping[str | None, str | None] = {"auto": None, "half": "float16", "float": "float32"}
"""Dtypes by their other names in ``--dtype``; ``auto`` depends on the model's config."""
MOST_LIKELY_ONLY = 1e-9
"""A ``top_p`` that any token reaches by itself."""


class SGLangServer(Server):
    """A server of SGLang."""

    tested = frozenset({"0.5.23"})

    async def facts(self) -> ServerFacts:
        info = await self.api.get("/model_info", PROBE_TIMEOUT_S)
        about = await self.api.get("/server_info", PROBE_TIMEOUT_S)
        with readable([info, about], f"{self.address} is no SGLang server: it sent something"):
            return ServerFacts(
                path=str(info["model_path"]),
                label=str(info["weight_version"]),
                ranks=int(about["tp_size"]),
                device=str(about["device"]),
                tokenizer_path=info.get("tokenizer_path"),
                model_type=info.get("model_type"),
                architectures=tuple(info.get("architectures") or ()) or None,
                context_length=about.get("context_length"),
                # Of its samplers all but FlashInfer's with min-p take top-k and top-p at one time.
                limits=ServerLimits(top_k_first=False, remedy="or draw with another engine"),
                dtype=DTYPES.get(about.get("dtype"), about.get("dtype")),
                settings={
                    # Defaults of the parameters that a request leaves out.
                    "--preferred-sampling-params": (info.get("preferred_sampling_params"), None),
                    "--quantization": (about.get("quantization"), None),
                },
                release=about.get("version"),
            )

    async def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self.api.post("/update_weight_version", body, PROBE_TIMEOUT_S)

    async def _pause(self, interrupt: Interrupt) -> None:
        # Retracted requests go back to the queue.
        await self.post("/pause_generation", {"mode": "retract" if interrupt == "continue" else "abort"})

    async def _continue(self) -> None:
        await self.api.post("/continue_generation", {}, PROBE_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        await self.post_if_up("/abort_request", {"rid": rid})

    async def flush_cache(self) -> None:
        await self.api.post("/flush_cache", {}, self.update_timeout_s, parse=False)

    async def load_directory(self, path: str) -> None:
        # Without a version, which the fleet gives to all servers once they have all loaded.
        await self.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    async def begin_update(self) -> None:
        await self.post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self.post("/end_weight_update", {})

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        # One for each rank: opening a name, or memory of a GPU, releases a reference that pickling has taken.
        flats: Sequence[Tensor | Opened] = list(map(Opened, memory)) or [flat_bytes(bucket)] * self.ranks
        payloads = [base64.b64encode(flattened_bucket(bucket, flat)).decode() for flat in flats]
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        await self.post("/update_weights_from_tensor", body)

    async def join(self, group: GroupAddress, rank: int) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self.post("/init_weights_update_group", body)

    async def load_broadcast(self, bucket: Bucket, group: str) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group,
            "flush_cache": False,
        }
        await self.post("/update_weights_from_distributed", body)

    async def leave(self, group: str) -> None:
        await self.post_if_up("/destroy_weights_update_group", {"group_name": group})

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        try:
            await self.post("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})
        except Refused as error:
            if "already loaded" not in str(error):  # a server of which only the connection was lost
                raise

    async def unload_adapter(self, adapter: ServedAdapter) -> None:
        await self.post_if_up("/unload_lora_adapter", {"lora_name": adapter.name})

    async def release_memory(self) -> None:
        await self.post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self.post("/resume_memory_occupation", {})


def flattened_bucket(bucket: Bucket, flat: Tensor | Opened) -> bytes:
    """``bucket`` as one buffer ``flat`` [n] of uint8, with names, shapes and places: SGLang's ``flattened_bucket``.

    SGLang (0.5.23) reads the attributes of its own class, which this environment lacks, and unpickles namespaces.
    """
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=(start := start_of(tensor)),
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        for name, tensor in bucket
    ]
    return pickled_by_name({"flattened_tensor": flat, "metadata": metadata})


class SglangWire(Wire):
    """``POST /generate``."""

    path = "/generate"
    rid = "rid"

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        return {
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
