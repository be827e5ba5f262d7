"""Inference engines during weight updates, pauses and sleep: served tokens before, meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.distributed.comm import Comm
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CheckpointError, EngineStateError, WeightsError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import serving

MOST_LATE = 48
"""Number of last answers to compare: requests follow each other during an update."""
LONG = replace(serving.PLAIN, max_new_tokens=40)
DRAWN = replace(serving.PLAIN, temperature=1.7)
REPEATED = 3
Answer = asyncio.Task[LLMResponse]
ON_THE_WAY_S = 0.1
"""Seconds in which an answer from before the pause may still arrive, after the previous answer."""
ATTEMPTS = 3
"""In none of so many is a pause so late that every answer was complete before it."""
STILL_S = 0.5
"""Long enough for some tokens of a tiny model."""


def published(
    subject: EngineUnderTest, model: TinyModel, version: int, verify: bool = False, name: str | None = None
) -> WeightUpdateMeta:
    """The weights of ``model`` as a train engine uploads them: a sealed model directory in place of the previous
    directory.

    It is called ``name``, or after its version.
    """
    source = subject.expected.models.directory(model)
    path = subject.directory(name or f"weights-{version}")

    def write(directory: Path) -> None:
        shutil.copytree(source, directory, dirs_exist_ok=True)

    write_checkpoint(str(path), write, Comm(), kind="hf", state={"version": version})
    return WeightUpdateMeta(version=version, path=str(path), verify=verify)


def _other(model: TinyModel, number: int) -> TinyModel:
    return replace(model, seed=model.seed + 1000 * number)


@check("I12.receive-disk", kind="inference", requires={Capability.SYNC_DISK})
def updates_from_disk_arrive(subject: EngineUnderTest) -> None:
    """After an update from disk every token is drawn by the new weights, all of them, and carries their version.

    Why: a receiver that takes only some tensors, loses the tie of the head, or keeps its version samples from
    an unknown policy (verl #5801, #7014, #6334, AReaL #941).
    Look at: names that the loader skips, tied heads, buffers, caches of prompts or directories, and the version of
    each token.
    """
    old, data = subject.model(), subject.data()
    engine = subject.serve(old, keep=False)
    requests = serving.requests_for(data)
    serving.verify_served(subject, "before the update", serving.ask(engine, requests), old, old, 0)
    for version, verify in ((1, False), (5, True)):
        new = _other(old, 1 + version)
        # Always through the same directory, as most trainers have it.
        serving.installed(engine, published(subject, new, version, verify, "weights"))
        serving.verify_version(subject, engine, version, "after the update")
        label = f"after the update to version {version}"
        serving.verify_served(subject, label, serving.ask(engine, requests), new, old, version)
        serving.verify_scores(subject, label, engine, data, new, old)
        old = new


@check("I12.failed-update", kind="inference", requires={Capability.SYNC_DISK}, each="layout")
def failed_updates_change_nothing(subject: EngineUnderTest) -> None:
    """An update that cannot be read fails with its cause, and weights and version stay unchanged; asleep, too.

    Why: a receiver with mixed weights, or with old weights under the new version, is found weeks later.
    Look at: whether everything is checked before anything is changed, when the version changes, and the weights
    after a sleep.
    """
    model, new = subject.model(), _other(subject.model(), 1)
    engine = subject.serve(model, keep=False)
    engine.set_version(3)
    unreadable = _unreadable(subject, model)
    _verify_failures(subject, engine, unreadable, model, 3)
    serving.installed(engine, published(subject, new, 4))  # no older than the failing updates
    responses = serving.ask(engine, serving.few_requests(subject))
    serving.verify_served(subject, "after an update that follows failed ones", responses, new, model, 4)
    if subject.spec.supports(Capability.RELEASE_MEMORY):
        _verify_failures(subject, engine, unreadable, new, 4, model, asleep=True)


def _verify_failures(
    subject: EngineUnderTest,
    engine: InferenceEngine,
    unreadable: Mapping[str, WeightUpdateMeta],
    served: TinyModel,
    version: int,
    old: TinyModel | None = None,
    *,
    asleep: bool = False,
) -> None:
    """Require errors of updates, and then the weights that were ``served`` before."""
    requests = serving.few_requests(subject)
    for name, meta in unreadable.items():
        label = f"from {name}" + " while the memory was released" * asleep
        problem = f"an update {label} did not raise a WeightsError or a CheckpointError"
        errors = (WeightsError, CheckpointError, *[EngineStateError] * asleep)
        with serving.asleep(engine) if asleep else nullcontext():
            subject.require_error(errors, partial(serving.installed, engine, meta), problem)
        serving.verify_version(subject, engine, version, f"after a failed update {label}")
        responses = serving.ask(engine, requests)
        serving.verify_served(subject, f"after an update {label}", responses, served, old, version)


def _unreadable(subject: EngineUnderTest, model: TinyModel) -> dict[str, WeightUpdateMeta]:
    new = _other(model, 2)
    missing = WeightUpdateMeta(version=4, path=str(subject.directory("nothing-here")))
    flipped = published(subject, new, 5, verify=True)
    _damage(flipped.directory, lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    truncated = published(subject, new, 6)
    _damage(truncated.directory, lambda content: content[:-100])
    config = model.config()
    config.vocab_size += 2
    foreign = WeightUpdateMeta(version=7, path=str(subject.directory("foreign")))
    second = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    second.save_pretrained(foreign.directory)
    return {
        "a directory that is not there": missing,
        "a file with a flipped bit (verify = True)": flipped,
        "a truncated file": truncated,
        "a model of another size": foreign,
    }


def _damage(directory: Path, change: Callable[[bytes], bytes]) -> None:
    file = next(iter(sorted(directory.glob("*.safetensors"))))
    file.write_bytes(change(file.read_bytes()))


@check("I14.update-in-flight", kind="inference", requires={Capability.SYNC_DISK}, each="layout")
def versions_are_those_of_the_weights(subject: EngineUnderTest) -> None:
    """Requests in flight during an update are answered in full; each token's version is that of its weights.

    Why: a label that changes before the weights do, or is read once for a whole answer, hides how far off the
    policy a sample is (slime #327, prime-rl #1901); samples that are thrown away are lost work.
    Look at: when the version changes in relation to the weights, and requests that an update interrupts.
    """
    old = subject.model()
    new = _other(old, 1)
    engine = subject.serve(old, keep=False)
    data = subject.data()
    requests = serving.requests_for(data, replace(serving.PLAIN, max_new_tokens=40), 20)
    responses = asyncio.run(_during(engine, requests, published(subject, new, 1)))

    label = "log-probs by the weights whose version tokens carry"
    serving.verify_by_version(subject, label, responses, {0: old, 1: new})
    after = serving.ask(engine, serving.requests_for(data, serving.PLAIN, 20))
    serving.verify_served(subject, "after an update with requests in flight", after, new, old, 1)


async def _during(
    engine: InferenceEngine, requests: Sequence[LLMRequest], meta: WeightUpdateMeta
) -> list[LLMResponse]:
    """The answers to requests from before the update, from right after it began, and from later as long as it runs.

    One of the later requests is on its way whenever the weights change.
    """
    half = len(requests) // 2
    running = asyncio.ensure_future(serving.answers(engine, requests[:half]))
    await serving.let_begin()
    update = asyncio.ensure_future(asyncio.to_thread(serving.installed, engine, meta))
    responses = [*await serving.answers(engine, requests[half:]), *await running]
    late: deque[LLMResponse] = deque(maxlen=MOST_LATE)
    again = cycle(requests)
    while not update.done():
        asked = next(again)
        request = LLMRequest(input_ids=asked.input_ids, sampling=asked.sampling)  # with a rid of its own
        late.extend(await serving.answers(engine, [request]))
    await update
    return [*responses, *late]


@check("I14.interrupted", kind="inference", requires={Capability.PAUSE}, each="layout")
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
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    await serving.let_begin()
    async with serving.paused(engine):
        waiting = {task for task in tasks if not task.done()}
        while waiting and (arrived := await _next(waiting, ON_THE_WAY_S)):
            waiting -= arrived
        during = len(await _next(waiting, STILL_S)) if waiting else None
    return during, await serving.gathered(tasks, LONG.max_new_tokens)


async def _next(tasks: set[Answer], longest_s: float) -> set[Answer]:
    """The next of ``tasks`` to end, perhaps several; none of them does if this is empty."""
    ended, _ = await asyncio.wait(tasks, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    return ended


@check("I15.sleep", kind="inference", requires={Capability.RELEASE_MEMORY}, each="layout")
def sleep_changes_nothing(subject: EngineUnderTest) -> None:
    """After ``release_memory`` and ``resume_memory``, greedy answers, log-probs and versions are unchanged.

    Draws without seeds do not begin again. Twice over, with an update of the weights between where ``sync_disk`` is
    declared. While the memory is released, requests are refused and not left to hang.

    Why: lost weights or buffers, copies of an earlier sleep that overwrite an update, and cached prefixes in reused
    memory give plausible answers (vllm #44371).
    Look at: memory that is released: weights without a copy, copies that are made once, a directory that is
    read again, buffers such as rotary frequencies, prefix caches; random states, which waking must not reset.
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
    requests = serving.few_requests(subject, serving.GREEDY)
    drawn = serving.few_requests(subject, DRAWN)
    first = [response.output_ids for response in serving.ask(engine, drawn)]
    before = [response.output_ids for response in serving.ask(engine, requests)]
    with serving.asleep(engine):
        problem = "a request to an engine whose memory is released was not refused"
        subject.require_error(EngineStateError, lambda: serving.ask(engine, requests[:1]), problem)
    again = [response.output_ids for response in serving.ask(engine, drawn)]
    problem = (
        f"after {turn}, {len(drawn)} requests without seeds draw the same tokens as the first ones before"
    )
    subject.require(first != again, problem)
    responses = serving.ask(engine, requests)
    serving.verify_served(subject, f"of greedy tokens after {turn}", responses, model, old, version)
    serving.verify_scores(subject, f"after {turn}", engine, serving.sequences_of(responses), model, old)
    changed = sum(a != b.output_ids for a, b in zip(before, responses, strict=True))
    subject.require(not changed, f"after {turn}, {changed} of {len(responses)} greedy answers are other ones")


@check("contract.launched-servers", kind="inference", requires={Capability.LAUNCH_SERVER}, each="engine")
def launched_servers_serve_those_who_connect(subject: EngineUnderTest) -> None:
    """Servers that the engine launched serve a second client by their addresses, and still run when that one leaves.

    Why: an evaluation or a second trainer that shares servers must not take them down with it.
    Look at: ``teardown``: it ends what this engine launched, and nothing else.
    """
    model = subject.model()
    engine = subject.serve(model)
    requests = serving.few_requests(subject)
    second = subject.connect(model)
    try:
        serving.verify_logprobs(subject, "log-probs of a second client", model, serving.ask(second, requests))
    finally:
        second.destroy()
    serving.verify_logprobs(
        subject, "log-probs after the second client has left", model, serving.ask(engine, requests)
    )
