"""Rules of the interface of inference engines: versions, cancelling, pausing, and undeclared options."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import RolloutError
from core_rl.registry.engines import load_config
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.contract import LAYOUTS, verify_undeclared
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.procedures import serving

C = Capability
OPTIONAL_SAMPLING = {
    C.STOP_STRINGS: SamplingParams(stop=("a",)),
    C.MIN_P: SamplingParams(min_p=0.1),
    C.REPETITION_PENALTY: SamplingParams(repetition_penalty=2.0),
    C.PRESENCE_PENALTY: SamplingParams(presence_penalty=1.0),
    C.LOGIT_BIAS: SamplingParams(logit_bias=((1, 1.0),)),
}
REFUSED_S = 10.0
"""More than any engine needs to refuse a request."""
PATIENCE = 5.0
"""Duration of a pause, relative to that of the same requests before it: a busy machine is slow at any time."""


@check("contract.rollout-undeclared", kind="inference", each="engine")
def undeclared_capabilities_of_rollouts_refuse(subject: EngineUnderTest) -> None:
    """An undeclared option raises `UnsupportedCapability` (a layout `LayoutError`), and the engine still works.

    Why: an ignored option serves something else than was asked for, without an error.
    Look at: capabilities that work but are missing in the spec.
    """
    engine = subject.serve()
    verify_undeclared(subject, _refusals(subject, engine))
    responses = serving.ask(engine, serving.few_requests(subject))
    serving.verify_logprobs(subject, "log-probs after refusals", subject.model(), responses)


def _refusals(subject: EngineUnderTest, engine: InferenceEngine) -> dict[Capability, Callable[[], object]]:
    batch = subject.data().batch()

    def update(meta: WeightUpdateMeta) -> Callable[[], object]:
        return lambda: engine.update_weights(meta).result(60)

    def built(**changes: object) -> Callable[[], object]:
        return lambda: _another(subject, engine, changes)

    def asked(sampling: SamplingParams) -> Callable[[], object]:
        return lambda: serving.ask(engine, [LLMRequest(input_ids=(1,), sampling=sampling)])

    path = str(subject.expected.models.directory(subject.model()))
    return {
        C.SCORE: lambda: engine.score(batch),
        C.TOP_LOGPROBS: lambda: engine.top_logprobs(batch, 1),
        C.RELEASE_MEMORY: engine.release_memory,
        C.SYNC_DISK: update(WeightUpdateMeta(version=0, path=path)),
        C.SYNC_TENSOR: update(WeightUpdateMeta(method="tensor", version=0)),
        C.SYNC_DISTRIBUTED: update(WeightUpdateMeta(method="distributed", version=0)),
        C.SYNC_LORA: update(WeightUpdateMeta(method="lora", version=0)),
        C.SYNC_DELTA: update(WeightUpdateMeta(version=0, path=path, delta=True)),
        **{capability: asked(sampling) for capability, sampling in OPTIONAL_SAMPLING.items()},
        C.LAUNCH_SERVER: lambda: _another(subject, engine, {}).launch_server(),
        C.BFLOAT16: built(dtype="bfloat16"),
        **{capability: built(layout=layout) for capability, layout in LAYOUTS.items()},
    }


def _another(
    subject: EngineUnderTest, engine: InferenceEngine, changes: dict[str, object]
) -> InferenceEngine:
    """A second engine with other fields of the config, not initialized."""
    values = {**engine.config.model_dump(), **changes}
    config = parse_config(load_config(subject.spec), values)
    assert isinstance(config, InferenceEngineConfig)
    made: InferenceEngine = subject.expected.servers.make(subject.spec, config)
    return made


@check("contract.rollout-versions", kind="inference", each="engine")
def tokens_carry_the_version(subject: EngineUnderTest) -> None:
    """Tokens carry the version that the driver set last, and a new version disturbs no request in flight.

    Why: a version that is stuck makes every sample look stale or fresh (AReaL #941, prime-rl #1901), and a
    label is no reason to abort running requests (miles #2372).
    Look at: where the version of each token comes from, and what ``set_version`` sends to the server.
    """
    engine = subject.serve()
    requests = serving.few_requests(subject)
    try:
        engine.set_version(41)
        _require_versions(subject, "after set_version(41)", serving.ask(engine, requests), {41})
        longer = serving.few_requests(subject, replace(serving.PLAIN, max_new_tokens=20))
        responses = asyncio.run(serving.meanwhile(engine, longer, partial(engine.set_version, 42)))
        _require_versions(subject, "with set_version(42) on the way", responses, {41, 42})
        serving.verify_version(subject, engine, 42, "after set_version(42)")
        _require_versions(subject, "after set_version(42)", serving.ask(engine, requests), {42})
    finally:
        engine.set_version(0)


def _require_versions(
    subject: EngineUnderTest, when: str, responses: Sequence[LLMResponse], versions: set[int]
) -> None:
    for response in responses:
        subject.require(
            response.stop_reason == "length",
            f"{when}, an answer ended with {response.stop_reason!r} after {len(response.output_ids)} tokens",
        )
        subject.require(
            set(response.versions) <= versions,
            f"{when}, tokens carry {sorted(set(response.versions))}; expected {sorted(versions)}",
        )


@check("contract.rollout-cancel", kind="inference", each="engine")
def cancelled_requests_disturb_no_others(subject: EngineUnderTest) -> None:
    """A cancelled request ends, and concurrent requests are answered as without it.

    Why: a workflow that cancels one sample must not cancel the rest of the batch.
    Look at: the message of a cancelled ``agenerate`` to the server: that request's ``rid``, not all of them.
    """
    model, data = subject.model(), subject.data()
    engine = subject.serve(model)
    # The name of each cancelled request begins that of the next one.
    requests = [
        replace(request, rid=f"answer-{number - number % 2}{number % 2 or ''}")
        for number, request in enumerate(serving.requests_for(data))
    ]
    responses = asyncio.run(_cancelling(engine, requests))
    subject.require(
        all(response.stop_reason == "length" for response in responses),
        f"next to cancelled requests, answers ended with {sorted({r.stop_reason for r in responses})}",
    )
    serving.verify_logprobs(subject, "log-probs next to cancelled requests", model, responses)
    serving.verify_logprobs(
        subject, "log-probs after cancelled requests", model, serving.ask(engine, requests[:4])
    )


async def _cancelling(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """The answers to every second request; the others are cancelled before they begin, as they begin, and later."""
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    given_up, remaining = tasks[::2], tasks[1::2]
    given_up[0].cancel()
    await serving.let_begin()
    # An engine may answer all at one time: later ones may be complete when they are cancelled.
    given_up[1].cancel()
    answered = asyncio.as_completed(remaining, timeout=CALL_TIMEOUT_S)
    for task, answer in zip(given_up[2:], answered, strict=False):
        await answer
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    return await serving.gathered(remaining, requests[0].sampling.max_new_tokens)


@check("contract.rollout-rid", kind="inference", each="engine")
def requests_have_rids_of_their_own(subject: EngineUnderTest) -> None:
    """A request whose ``rid`` another one in flight has is refused with a `RolloutError`, and accepted after that one.

    Why: servers abort requests by their rid, and mix up the answers of two that share one; SGLang refuses the second.
    Look at: nothing: the core refuses it before a backend sees it.
    """
    model = subject.model()
    engine = subject.serve(model)
    request = serving.few_requests(subject)[0]
    refused, responses = asyncio.run(_sharing_a_rid(engine, request))
    subject.require(refused, f"two requests with the rid {request.rid!r} were in flight at one time")
    serving.verify_logprobs(subject, "log-probs next to a refused request", model, responses)
    # With fewer tokens: the answer before is none to this request.
    again = replace(request, sampling=replace(request.sampling, max_new_tokens=2))
    serving.verify_logprobs(
        subject, "log-probs of a rid that is free again", model, serving.ask(engine, [again])
    )


async def _sharing_a_rid(engine: InferenceEngine, request: LLMRequest) -> tuple[bool, list[LLMResponse]]:
    """Whether the second of two equal requests was refused, and the answer to the first."""
    async with serving.paused(engine):  # so that the first is still in flight
        first, second = (asyncio.ensure_future(serving.answers(engine, [request])) for _ in range(2))
        await asyncio.wait([second], timeout=REFUSED_S)
        refused = second.done() and isinstance(second.exception(), RolloutError)
    await asyncio.gather(second, return_exceptions=True)
    return refused, await first


@check("contract.rollout-pause", kind="inference", each="engine")
def paused_engines_hold_requests_back(subject: EngineUnderTest) -> None:
    """While the engine is paused no new request is answered; after ``resume`` all of them are.

    Why: tokens that are drawn while weights change belong to no version (I14).
    Look at: nothing, unless the backend implements ``pause`` and ``resume``.
    """
    model = subject.model()
    engine = subject.serve(model)
    requests = serving.few_requests(subject)
    started = time.monotonic()
    asyncio.run(serving.answers(engine, requests))
    patience_s = max(0.5, PATIENCE * (time.monotonic() - started))
    early, responses = asyncio.run(_paused(engine, requests, patience_s))
    subject.require(
        early == 0, f"{early} of {len(requests)} requests were answered while the engine was paused"
    )
    serving.verify_logprobs(subject, "log-probs after a pause", model, responses)


async def _paused(
    engine: InferenceEngine, requests: Sequence[LLMRequest], patience_s: float
) -> tuple[int, list[LLMResponse]]:
    """The number of answers during the pause, and all answers. The pause ends after the first, or ``patience_s``."""
    async with serving.paused(engine):
        tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
        # Long enough for an engine that does not wait; an engine that waits is never late.
        await asyncio.wait(tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        early = sum(task.done() for task in tasks)
    return early, await serving.gathered(tasks, requests[0].sampling.max_new_tokens)
