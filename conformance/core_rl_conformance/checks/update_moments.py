"""Weights that reach an inference engine at inconvenient moments: one update upon another, in a pause, and asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from core_rl.backend.meta import SyncMethod
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, methods_of, sent, sync_meta, tensors_of

# Greedy, so that many answers are few sequences for the oracle.
SHORT = replace(serving.PLAIN, temperature=0.0, max_new_tokens=2)
UPDATES = 4


@check("I14.updates-in-a-row", kind="inference", requires={Capability.SYNC_TENSOR}, each="layout")
def versions_hold_under_many_updates(subject: EngineUnderTest) -> None:
    """While updates follow each other, some inside a pause, each token has the version of the weights that drew it.

    Short answers end at each moment of an update.

    Why: a version that is read when an answer is handed out, some milliseconds after its tokens were drawn, is often
    that of the next weights (slime #327, prime-rl #1901); a second update, or one in a pause, may be dropped.
    Look at: where the version of a token is read: with its draw, on the thread or server that changes the weights.
    """
    first = subject.model()
    second = replace(first, seed=first.seed + 1000)
    engine = subject.serve(first, keep=False)
    requests = serving.few_requests(subject, SHORT, 20)[:2]
    models = {version: second if version % 2 else first for version in range(UPDATES + 1)}
    update = partial(_update_often, subject, engine, models, requests)
    responses = _distinct(asyncio.run(_ask_during(engine, requests, update)))
    expected = {model: serving.expected_of(subject, model, responses) for model in (first, second)}
    sides = {version: expected[model] for version, model in models.items()}
    label = f"log-probs by the weights whose version tokens carry, during {UPDATES} updates"
    serving.verify_by_version(subject, label, responses, sides)
    after = serving.ask(engine, requests)
    serving.verify_served(subject, "after the last update", after, first, second, UPDATES)


def _update_often(
    subject: EngineUnderTest,
    engine: InferenceEngine,
    models: Mapping[int, TinyModel],
    requests: Sequence[LLMRequest],
) -> list[LLMResponse]:
    """Update to each version of ``models``; answers to ``requests`` after each."""
    responses: list[LLMResponse] = []
    tensors = {model: tensors_of(subject.expected.models.directory(model)) for model in models.values()}
    for version in range(1, UPDATES + 1):
        paused = version == 3
        if paused:
            engine.pause()
        try:
            sent(engine, sync_meta(subject, "tensor", version, LARGE_BUCKET), tensors[models[version]])
        finally:
            if paused:
                engine.resume()
        responses += serving.ask(engine, [_again(request) for request in requests])
    return responses


async def _ask_during(
    engine: InferenceEngine, requests: Sequence[LLMRequest], update: Callable[[], list[LLMResponse]]
) -> list[LLMResponse]:
    """The answers to clients that ask again and again until ``update`` ends, and what it returns."""
    updating = asyncio.ensure_future(asyncio.to_thread(update))

    async def ask(asked: LLMRequest) -> list[LLMResponse]:
        responses = []
        while not updating.done():
            responses += await serving.answers(engine, [_again(asked)])
            await asyncio.sleep(0)
        return responses

    answered = await asyncio.gather(*map(ask, requests))
    return [response for responses in [await updating, *answered] for response in responses]


def _again(request: LLMRequest) -> LLMRequest:
    """The same request with a rid of its own."""
    return LLMRequest(input_ids=request.input_ids, sampling=request.sampling)


def _distinct(responses: Sequence[LLMResponse]) -> list[LLMResponse]:
    """The first of equal answers by equal weights."""
    return list(
        {
            (
                response.input_ids,
                response.output_ids,
                tuple(version % 2 for version in response.versions),
                tuple(round(value, 3) for value in response.logprobs),
            ): response
            for response in responses
        }.values()
    )


@check("I15.update-asleep", kind="inference", requires={Capability.RELEASE_MEMORY}, each="engine")
def updates_while_asleep_are_served(subject: EngineUnderTest) -> None:
    """Weights that arrive while the memory is released are served after `resume_memory`, or the update is refused.

    By each declared method but adapters, and so is a version that ``set_version`` sets meanwhile. A refusal raises
    `EngineStateError` or `WeightsError`, and leaves the old weights and their version.

    Why: an engine that wakes with the weights that it fell asleep with, under the new version, samples from an old
    policy (vllm #44371, verl #7014).
    Look at: copies of the weights that ``release_memory`` makes and ``resume_memory`` restores.
    """
    old = subject.model()
    engine = subject.serve(old, keep=False)
    requests = serving.few_requests(subject)
    methods = methods_of(subject)
    for version, method in enumerate(methods, start=1):
        new = replace(old, seed=old.seed + 1000)
        update = partial(_send, subject, engine, method, version, new)
        arrived = serving.arrives_asleep(engine, update)
        served, carried = (new, version) if arrived else (old, engine.get_version())
        label = f"after update {version}, by {method}, {'while' if arrived else 'refused while'} asleep"
        subject.require(arrived or carried < version, f"{label}: get_version() is {carried}")
        serving.verify_version(subject, engine, carried, label)
        serving.verify_served(subject, label, serving.ask(engine, requests), served, old, carried)
        old = served
    last = len(methods) + 1
    carried = (
        last if serving.arrives_asleep(engine, partial(engine.set_version, last)) else engine.get_version()
    )
    label = f"after set_version({last}) while asleep"
    serving.verify_version(subject, engine, carried, label)
    serving.verify_served(subject, label, serving.ask(engine, requests), old, old, carried)


def _send(
    subject: EngineUnderTest, engine: InferenceEngine, method: SyncMethod, version: int, model: TinyModel
) -> None:
    if method == "disk":
        serving.installed(engine, published(subject, model, version))
    else:
        tensors = tensors_of(subject.expected.models.directory(model))
        # Servers whose memory was released load the buckets again.
        sent(engine, sync_meta(subject, method, version, LARGE_BUCKET), tensors, overwrite=False)
