"""Checks of the public methods of `InferenceEngine`, and the gate that admits its requests."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from core_rl.backend.inference_backend import ModelLimits, TopLogprobs
from core_rl.backend.meta import SyncMethod
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import media_violations
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.guards import batch_violations, check_layout, require_adapter, require_capability
from core_rl.engine.placeholders import placeholder_violations
from core_rl.errors import (
    BatchError,
    ConfigError,
    EngineContractError,
    EngineStateError,
    RolloutError,
    raise_all,
)
from core_rl.registry.spec import EngineSpec


def check_config(spec: EngineSpec, config: InferenceEngineConfig) -> None:
    """Raise `LayoutError`, `UnsupportedCapability` or `ConfigError` for settings that the engine does not declare."""
    check_layout(spec, config.layout)
    if config.dtype == "bfloat16":
        require_capability(spec, Capability.BFLOAT16, "dtype = 'bfloat16'")
    if config.device == "cuda":
        require_capability(spec, Capability.CUDA, "device = 'cuda'")
    if config.model.vision:
        require_capability(spec, Capability.VISION, "a config with model.vision")
    if config.model.lora is not None:
        require_capability(spec, Capability.SYNC_LORA, "a config with model.lora")
        if config.model.lora.path is not None:
            raise ConfigError(
                f"model.lora.path = {config.model.lora.path!r}; an inference engine starts from the base model, and "
                "its adapter comes by update_weights(); leave it out"
            )
    ranks = config.layout.world_size
    if config.devices and len(set(config.devices)) != ranks:
        raise ConfigError(
            f"devices = {list(config.devices)}: layout {config.layout} has {ranks} ranks; name a different device for "
            "each"
        )
    if config.model.head != "lm":
        raise ConfigError(
            f"model.head = {config.model.head!r}; an inference engine generates with the head 'lm'"
        )


def check_sync(config: InferenceEngineConfig, method: SyncMethod) -> None:
    """Raise `EngineStateError` unless an engine with ``config`` takes updates by ``method``.

    With ``model.lora`` it takes adapters over the model of ``config``, and else whole models.
    """
    if method == "lora":
        require_adapter(config, "update_weights() by 'lora'")
    elif config.model.lora is not None:
        raise EngineStateError(
            f"update_weights() by {method!r} on an engine with model.lora, which takes its adapter alone: by 'lora'; "
            "without model.lora it takes weights with the adapter merged into them"
        )


def check_sampling(spec: EngineSpec, sampling: SamplingParams, where: str) -> None:
    """Raise `UnsupportedCapability` for what ``sampling`` asks and the engine does not declare."""
    for capability in sorted(sampling.needed_capabilities):
        require_capability(spec, capability, f"{where} with {capability.value}")


def check_request(request: LLMRequest, limits: ModelLimits) -> None:
    """Raise one `RolloutError` that lists everything that the model cannot take: servers die of some of it."""
    raise_all(RolloutError, f"request {request.rid}", _request_violations(request, limits))


def _request_violations(request: LLMRequest, limits: ModelLimits) -> Iterable[str]:
    if not request.input_ids:
        yield "the prompt is empty; give at least one token, such as BOS"
    sampling = request.sampling
    fields = {
        "prompt": request.input_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
    }
    for where, ids in fields.items():
        foreign = [token for token in ids if not 0 <= token < limits.vocab_size]
        if foreign:
            yield f"{where} holds the token id {foreign[0]}; the vocabulary has {limits.vocab_size} entries"
    needed = len(request.input_ids) + request.sampling.max_new_tokens
    if limits.context_length is not None and needed > limits.context_length:
        yield (
            f"a prompt of {len(request.input_ids)} tokens and max_new_tokens = {request.sampling.max_new_tokens} "
            f"exceed the context of {limits.context_length}; shorten one of them"
        )
    yield from media_violations([request.media], 1)
    if request.input_ids:
        rows = (torch.tensor(ids) for ids in [request.input_ids])  # made only where a model takes images
        yield from placeholder_violations(rows, [request.media], limits.image_model)


def check_response(request: LLMRequest, response: LLMResponse, limits: ModelLimits, weights: range) -> None:
    """Raise `EngineContractError` unless ``response`` belongs to ``request`` and its versions are in ``weights``."""
    if not isinstance(response, LLMResponse):
        raise EngineContractError(
            f"agenerate() returned a {type(response).__name__}; it returns an LLMResponse"
        )
    violations = _response_violations(request, response, limits, weights)
    raise_all(EngineContractError, f"response to request {request.rid}", violations)


def _response_violations(
    request: LLMRequest, response: LLMResponse, limits: ModelLimits, weights: range
) -> Iterable[str]:
    if (response.rid, response.input_ids) != (request.rid, request.input_ids):
        yield f"it repeats another request (rid {response.rid!r}) or another prompt"
    if len(response.output_ids) > request.sampling.max_new_tokens:
        yield f"{len(response.output_ids)} tokens; max_new_tokens = {request.sampling.max_new_tokens}"
    if response.stop_reason == "length" and len(response.output_ids) < request.sampling.max_new_tokens:
        yield f"stop_reason = 'length' after {len(response.output_ids)} of {request.sampling.max_new_tokens} tokens"
    # Values of the engine may be of any type, whatever is annotated.
    tokens: Sequence[object] = response.output_ids
    logprobs: Sequence[object] = response.logprobs
    versions: Sequence[object] = response.versions
    foreign = [t for t in tokens if not (isinstance(t, int) and 0 <= t < limits.vocab_size)]
    if foreign:
        yield f"the output token {foreign[0]!r} is not in the vocabulary of {limits.vocab_size}"
    # Rounding may lift the log-prob of a certain token a little above 0.
    odd = [p for p in logprobs if not (isinstance(p, float) and math.isfinite(p) and p <= 1e-4)]
    if odd:
        yield f"the log-prob {odd[0]!r} is not a finite float of at most 0"
    if any(not (isinstance(v, int) and v in weights) for v in versions):
        versions_drawn = sorted(set(response.versions))
        yield f"versions {versions_drawn}; the weights had {weights.start} to {weights.stop - 1} meanwhile"
    elif any(later < earlier for earlier, later in pairwise(response.versions)):
        yield f"versions fall along the response: {response.versions}"


def check_batch(batch: SequenceBatch, limits: ModelLimits) -> None:
    """Raise `BatchError` for an empty batch, and for sequences that the model cannot take."""
    violations = batch_violations(batch, limits) if batch.num_sequences else ["the batch is empty"]
    raise_all(BatchError, "score", violations)


def check_scores(name: str, values: object, shape: Sequence[int], batch: SequenceBatch) -> Tensor:
    """``values`` on the CPU, or `EngineContractError` unless they are float32, of ``shape``, and 0 at first tokens."""
    if not isinstance(values, Tensor) or values.dtype != torch.float32 or list(values.shape) != list(shape):
        got = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise EngineContractError(f"{name} returned {got}; it returns float32 {list(shape)}")
    values = values.detach().cpu()
    firsts = values[batch.cu_seqlens[:-1].long()]
    if bool(torch.isnan(values).any()) or bool((firsts != 0).any()):
        raise EngineContractError(f"{name} returned NaN, or something other than 0 for a first token")
    return values


def check_top(top: TopLogprobs, k: int, batch: SequenceBatch) -> TopLogprobs:
    """``top`` on the CPU, or `EngineContractError` unless both are ``[T, k]`` and ids are int64."""
    shape = [batch.num_tokens, k]
    logprobs = check_scores("top_logprobs()", top.logprobs, shape, batch)
    if top.ids.dtype != torch.long or list(top.ids.shape) != shape:
        raise EngineContractError(
            f"top_logprobs() returned ids {top.ids.dtype} {list(top.ids.shape)}, not {shape}"
        )
    return TopLogprobs(ids=top.ids.cpu(), logprobs=logprobs)


class RequestGate:
    """Blocks requests while the engine is paused, and refuses them while its memory is released or their rid is in use.

    Its methods may be called from any thread; `wait` from any event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Future[None] | None = None
        """Done when the engine resumes; None while it is not paused."""
        self._in_flight = 0
        self._rids: set[str] = set()
        """Names of waiting requests and of requests in flight."""
        self._released = False

    @property
    def is_open(self) -> bool:
        """Whether requests pass; false while paused."""
        return self._opened is None

    def close(self) -> bool:
        """Block requests until `open`; false if they are blocked already."""
        with self._lock:
            if self._opened is not None:
                return False
            self._opened = Future()
            return True

    def open(self) -> None:
        """Let the waiting requests pass."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.set_result(None)

    async def wait(self) -> None:
        """Return when the gate is open."""
        while (opened := self._opened) is not None:
            # Shielded: one cancelled request must not open the gate for the others.
            await asyncio.shield(asyncio.wrap_future(opened))

    @contextmanager
    def named(self, rid: str) -> Iterator[None]:
        """Keep ``rid`` for one request. Raises `RolloutError` while another one has it."""
        with self._lock:
            if rid in self._rids:
                raise RolloutError(
                    f"a request with the rid {rid!r} is in flight already; give each request a rid of its own, or none"
                )
            self._rids.add(rid)
        try:
            yield
        finally:
            with self._lock:
                self._rids.discard(rid)

    def require_memory(self, method: str) -> None:
        """Raise `EngineStateError` while the memory is released."""
        if self._released:
            raise EngineStateError(f"{method} while the memory is released; call resume_memory() first")

    @contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Count a request in flight. Raises `EngineStateError` while the memory is released."""
        with self._lock:
            self.require_memory(method)
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def release_memory(self) -> None:
        """Refuse requests until `resume_memory`. Raises `EngineStateError` while some are in flight."""
        with self._lock:
            if self._in_flight:
                raise EngineStateError(
                    f"release_memory() with {self._in_flight} requests in flight; wait for them"
                )
            self._released = True

    def resume_memory(self) -> None:
        """Admit requests again."""
        self._released = False


@dataclass(frozen=True, kw_only=True)
class InferenceComponents:
    """Parts of `InferenceEngine` that no backend can change; the suite's own tests plant bugs in them."""

    gate: Callable[[], RequestGate] = RequestGate
    require_capability: Callable[[EngineSpec, Capability, str], None] = require_capability
