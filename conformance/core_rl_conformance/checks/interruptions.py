"""Inference engines that are interrupted: paused with requests in flight, put to sleep, shared by several clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import EngineStateError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import serving

GREEDY = replace(serving.PLAIN, temperature=0.0)
LONG = replace(serving.PLAIN, max_new_tokens=40)
REPEATED = 3
Answers = asyncio.Task[list[LLMResponse]]
ON_THE_WAY_S = 0.1
"""Seconds in which an answer from before the pause may still arrive, after the previous answer."""
ATTEMPTS = 3
"""In none of so many is a pause so late that every answer was complete before it."""
STILL_S = 0.5
"""Long enough for some tokens of a tiny model."""


@check("I14.interrupted", kind="inference", requires=[Capability.PAUSE], each="layout")
def interrupted_answers_are_completed(subject: EngineUnderTest) -> None:
    """Requests that a pause interrupts draw nothing until ``resume``, and then all of the tokens that they asked for.

    Why: answers that end at the pause, lose the tokens of before, or count their budget anew are trained on all
    the same (verl #7207, slime #327).
    Look at: the server's running requests at the pause, and with their cached keys and values.
    """
    model = subject.model()
    engine = subject.serve(model)
    # Each request has a rid of its own: a server refuses a rid in flight.
    data = subject.data()
    requests = [request for _ in range(REPEATED) for request in serving.requests_for(data, LONG, 20)]
    for _ in range(ATTEMPTS):
        during, responses = asyncio.run(_interrupted(engine, requests))
        if during is not None:
            break
    problem = f"{during or 'all'} requests that a pause had interrupted were answered before resume()"
    subject.require(during == 0, problem)
    wrong = [response for response in responses if len(response.output_ids) != LONG.max_new_tokens]
    subject.require(
        not wrong,
        f"{len(wrong)} of {len(responses)} interrupted answers do not have the {LONG.max_new_tokens} tokens that were "
        f"asked for: {sorted({len(response.output_ids) for response in wrong})}",
    )
    serving.verify_logprobs(subject, "log-probs of interrupted answers", model, responses)


async def _interrupted(
    engine: InferenceEngine, requests: Sequence[LLMRequest]
) -> tuple[int | None, list[LLMResponse]]:
    """The number of answers that were drawn during the pause, and all answers.

    Answers complete before it may still arrive, one upon the other. None if all have come like that.
    """
    tasks = [asyncio.ensure_future(serving.answers(engine, [request])) for request in requests]
    await serving.let_begin()
    await asyncio.to_thread(engine.pause)
    waiting = {task for task in tasks if not task.done()}
    try:
        while waiting and (arrived := await _next(waiting, ON_THE_WAY_S)):
            waiting -= arrived
        during = len(await _next(waiting, STILL_S)) if waiting else None
    finally:
        await asyncio.to_thread(engine.resume)
    return during, [response for answer in await asyncio.gather(*tasks) for response in answer]


async def _next(tasks: set[Answers], longest_s: float) -> set[Answers]:
    """The next of ``tasks`` to end, perhaps several; none of them does if this is empty."""
    ended, _ = await asyncio.wait(tasks, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    return ended


@check("I15.sleep", kind="inference", requires=[Capability.RELEASE_MEMORY], each="layout")
def sleep_changes_nothing(subject: EngineUnderTest) -> None:
    """After ``release_memory`` and ``resume_memory``, greedy answers, log-probs and versions are unchanged.

    Twice over, with an update of the weights between where ``sync_disk`` is declared. While the memory is
    released, requests are refused and not left to hang.

    Why: lost weights or buffers, copies of an earlier sleep that overwrite an update, and cached prefixes in reused
    memory give plausible answers (vllm #44371).
    Look at: memory that is released: weights without a copy, copies that are made once, a directory that is
    read again, buffers such as rotary frequencies, prefix caches.
    """
    model = subject.model()
    engine = subject.serve(model, keep=False)
    _verify_sleep(subject, engine, "the first sleep", model, model, 0)
    served, version = model, 0
    if subject.spec.supports(Capability.SYNC_DISK):
        served, version = replace(model, seed=model.seed + 1000), 1
        serving.installed(engine, published(subject, served, version))
    _verify_sleep(subject, engine, "the second sleep", served, model, version)


def _verify_sleep(
    subject: EngineUnderTest,
    engine: InferenceEngine,
    turn: str,
    model: TinyModel,
    old: TinyModel,
    version: int,
) -> None:
    """Put ``engine``, which serves ``model`` as ``version``, to sleep and wake it."""
    requests = serving.requests_for(subject.data().select(serving.FEW), GREEDY)
    before = [response.output_ids for response in serving.ask(engine, requests)]
    engine.release_memory()
    try:
        problem = "a request to an engine whose memory is released was not refused"
        subject.require_error(EngineStateError, lambda: serving.ask(engine, requests[:1]), problem)
    finally:
        engine.resume_memory()
    responses = serving.ask(engine, requests)
    serving.verify_served(subject, f"of greedy tokens after {turn}", responses, model, old, version)
    changed = sum(a != b.output_ids for a, b in zip(before, responses, strict=True))
    subject.require(not changed, f"after {turn}, {changed} of {len(responses)} greedy answers are other ones")


@check("contract.launched-servers", kind="inference", requires=[Capability.LAUNCH_SERVER], each="engine")
def launched_servers_serve_those_who_connect(subject: EngineUnderTest) -> None:
    """Servers that the engine launched serve a second client by their addresses, and still run when that one leaves.

    Why: an evaluation or a second trainer that shares servers must not take them down with it.
    Look at: ``teardown``: it ends what this engine launched, and nothing else.
    """
    model = subject.model()
    engine = subject.serve(model)
    requests = serving.requests_for(subject.data().select(serving.FEW))
    second = subject.connect(model)
    try:
        serving.verify_logprobs(subject, "log-probs of a second client", model, serving.ask(second, requests))
    finally:
        second.destroy()
    serving.verify_logprobs(
        subject, "log-probs after the second client has left", model, serving.ask(engine, requests)
    )
