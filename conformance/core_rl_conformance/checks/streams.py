"""Weights that go from engine to engine in buckets, through memory or a process group (``tensor``, ``distributed``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core_rl.backend.meta import SyncMethod
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMResponse
from core_rl.engine.sync import sync_weights
from core_rl.errors import WeightsError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.moving import elsewhere, load_weights, state, train
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sent, sync_meta, tensors_of
from core_rl_conformance.reproduction import Weights, computation_of

TINY_BUCKET = 4096
"""Less than most tensors of a tiny model have."""


@check("I12.tensor", requires={Capability.SYNC_TENSOR}, images=True, any_model=True)
def tensor_sync_sends_the_present_weights(subject: EngineUnderTest) -> None:
    """``upload_weights`` by tensor sends every parameter once, as it is after the last step or load, bit for bit.

    The saved buffers follow (`I6.layer-kinds`), and nothing else: a tied matrix comes under one name.

    Why: a bucket overwritten before it is read; a last bucket that is not flushed; views sent with the strides of a
    larger tensor; gathered copies of an earlier step (verl #6813, #6919, #7014, #5801).
    Look at: ``named_tensors("params")`` and ``("buffers")``: their tensors are valid until the next item.
    """
    _verify_sending(subject, "tensor")


@check("I12.distributed", requires={Capability.SYNC_DISTRIBUTED}, each="layout", images=True)
def distributed_sync_sends_the_present_weights(subject: EngineUnderTest) -> None:
    """``upload_weights`` by distributed broadcasts every parameter once, as it is after the last step or load.

    Why: a rank that broadcasts in another order than it announced, or a buffer that is overwritten during its
    transfer, corrupts weights without an error (verl #6813, #7014, AReaL #941).
    Look at: the device of exported tensors, and `I12.tensor`, which is the same without a process group.
    """
    _verify_sending(subject, "distributed")


def _verify_sending(subject: EngineUnderTest, method: SyncMethod) -> None:
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    group.set_version(3)
    buffers = frozenset(group.tensor_shapes("buffers"))
    for version, bucket_bytes, when in (
        (4, LARGE_BUCKET, "step 1"),
        (5, TINY_BUCKET, "step 2"),
        (6, TINY_BUCKET, "a load"),
    ):
        before = state(group, ["master"])["master"]
        if when == "a load":
            load_weights(subject, group, elsewhere(model))
        else:
            train(group, subject, [version - 4])
        sent_update = caught(group, sync_meta(subject, method, version, bucket_bytes, verify=version == 5))
        label = f"parameters sent after {when} in buckets of {bucket_bytes} bytes"
        names = [name for bucket in sent_update.buckets for name in bucket]
        subject.require(len(names) == len(set(names)), f"{label}: a tensor comes twice: {sorted(names)}")
        params = {name: value.to(subject.dtype) for name, value in group.named_tensors("master").items()}
        sent_params = {name: value for name, value in sent_update.tensors.items() if name not in buffers}
        names_only = computation_of(model, Weights(shapes_only=True))
        subject.verify_same(label, sent_params, params, before, of=names_only)
        sized = zip(sent_update.buckets, sent_update.sizes, strict=True)
        large = [bucket for bucket, size in sized if size > bucket_bytes and len(bucket) > 1]
        subject.require(not large, f"{label}: a bucket is larger than that: {large[:1]}")
    serving.verify_version(subject, group, 3, "after uploading weights")


@check("I12.receive-tensor", kind="inference", requires={Capability.SYNC_TENSOR})
def updates_from_tensors_arrive(subject: EngineUnderTest) -> None:
    """After an update by tensor every token is drawn by the new weights, all of them, also after a cached prefix.

    In one bucket and in many, one update after another, with requests in flight. These are answered in full; tokens
    carry the version of the weights that drew them.

    Why: a receiver that takes the first bucket only, installs buckets during decoding, or keeps the old prefix cache
    or version (verl #6813, #5801, vllm #9744, #44371, slime #327).
    Look at: the end of an update, names that the loader skips, tied heads, caches, and the version of each token.
    """
    _verify_receiving(subject, "tensor")


@check("I12.receive-distributed", kind="inference", requires={Capability.SYNC_DISTRIBUTED}, each="layout")
def updates_from_a_group_arrive(subject: EngineUnderTest) -> None:
    """The same for an update by distributed, whose tensors come from a process group with the trainer's rank.

    Why: tensors received in another order than announced; a rank that is not in the group; a group of the previous
    update (slime #327, AReaL #941).
    Look at: `I12.receive-tensor` first; then the members, and the end of the group.
    """
    _verify_receiving(subject, "distributed")


def _verify_receiving(subject: EngineUnderTest, method: SyncMethod) -> None:
    old, data = subject.model(), subject.data()
    engine = subject.serve(old, keep=False)
    requests = serving.requests_for(data.select(serving.FEW))
    long = serving.requests_for(data.select(serving.FEW), replace(serving.PLAIN, max_new_tokens=24), 20)
    serving.verify_served(subject, "before the update", serving.ask(engine, requests), old, old, 0)
    before = 0
    for version, bucket_bytes, verify in ((1, LARGE_BUCKET, False), (5, TINY_BUCKET, True)):
        new = replace(old, seed=old.seed + 1000 * version)
        tensors = tensors_of(subject.expected.models.directory(new))
        update = partial(sent, engine, sync_meta(subject, method, version, bucket_bytes, verify), tensors)
        responses = asyncio.run(serving.meanwhile(engine, long, update))

        label = f"log-probs by the weights whose version tokens carry, around the update to version {version}"
        serving.verify_by_version(subject, label, responses, {before: old, version: new})
        serving.verify_version(subject, engine, version, "after the update")
        label = f"after the update to version {version} in buckets of {bucket_bytes} bytes"
        serving.verify_served(subject, label, serving.ask(engine, requests), new, old, version)
        old, before = new, version


@check("I12.broken-stream", kind="inference", requires={Capability.SYNC_TENSOR}, each="layout")
def broken_streams_change_nothing(subject: EngineUnderTest) -> None:
    """An update by tensor that breaks off, lacks a tensor or has a wrong shape fails, and the old weights serve on.

    Requests that arrive before the error are answered by the old weights too, under their version.

    Why: a trainer that dies in the middle of an update leaves a mixture of two policies behind, without any error. It
    serves for a while where an engine continues before it has restored the old weights.
    Look at: what becomes of buckets that were installed before the error, when requests continue, and when the
    version changes.
    """
    _verify_breaking(subject, "tensor")


@check("I12.broken-group", kind="inference", requires={Capability.SYNC_DISTRIBUTED}, each="layout")
def broken_groups_change_nothing(subject: EngineUnderTest) -> None:
    """The same for an update by distributed: whoever waits in the process group is let go.

    Why: a collective whose sender is gone waits for half an hour and then takes the server with it, or leaves a mixture
    of two policies.
    Look at: errors of collectives, the ranks that leave the group, and where the old weights come from.
    """
    _verify_breaking(subject, "distributed")


def _verify_breaking(subject: EngineUnderTest, method: SyncMethod) -> None:
    model = subject.model()
    engine = subject.serve(model, keep=False)
    requests = serving.few_requests(subject)
    items = list(
        tensors_of(subject.expected.models.directory(replace(model, seed=model.seed + 2000))).items()
    )
    with ThreadPoolExecutor(1) as pool:
        asked: list[Future[list[LLMResponse]]] = []

        def ask() -> None:
            asked.append(pool.submit(serving.ask, engine, requests))

        broken = {
            "breaks off": _broken(items[: len(items) // 2], ask, WeightsError("the sender broke off")),
            "lacks a tensor": _broken(items[:-1], ask),
            "has a wrong shape": _broken([*items[:-1], (items[-1][0], torch.zeros(3, 5))], ask),
        }
        for number, (label, stream) in enumerate(broken.items()):
            problem = f"an update that {label} did not raise a WeightsError"
            update = partial(sent, engine, sync_meta(subject, method, 2 + number, TINY_BUCKET), stream)
            subject.require_error(WeightsError, update, problem)
            during = asked.pop().result()
            serving.verify_served(subject, f"during an update that {label}", during, model, model, 0)
            serving.verify_version(subject, engine, 0, f"after an update that {label}")
            after = serving.ask(engine, requests)
            serving.verify_served(subject, f"after an update that {label}", after, model, model, 0)
    new = replace(model, seed=model.seed + 1000)
    tensors = tensors_of(subject.expected.models.directory(new))
    sent(engine, sync_meta(subject, method, 9, TINY_BUCKET), tensors)
    responses = serving.ask(engine, requests)
    serving.verify_served(subject, "after an update that follows broken ones", responses, new, model, 9)


def _broken(
    items: Sequence[tuple[str, Tensor]], ask: Callable[[], None], error: WeightsError | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights of which some are missing, or that end with an ``error``; in their middle, ``ask`` sends requests."""
    half = len(items) // 2
    yield from items[:half]
    ask()
    yield from items[half:]
    if error is not None:
        raise error


@check(
    "I12.sync-tensor",
    partner="inference",
    requires={Capability.SYNC_TENSOR},
    partner_requires={Capability.SYNC_TENSOR},
    each="layout",
)
def trained_weights_arrive_by_tensor(subject: EngineUnderTest) -> None:
    """After each step and sync by tensor, the rollout engine draws from the weights that the train engine has.

    Why: weights of the step before, of some tensors only, or a version that one side counts by itself
    (verl #7014, #5801, AReaL #941, prime-rl #1901).
    Look at: `I12.tensor` for the sender and `I12.receive-tensor` for the receiver; this one needs both.
    """
    _verify_pair(subject, "tensor")


@check(
    "I12.sync-distributed",
    partner="inference",
    requires={Capability.SYNC_DISTRIBUTED},
    partner_requires={Capability.SYNC_DISTRIBUTED},
    each="engine",
)
def trained_weights_arrive_by_a_group(subject: EngineUnderTest) -> None:
    """After each step and sync by distributed, the rollout engine draws from the weights that the train engine has.

    Why: weights of the step before, of some tensors only, or a version that one side counts by itself
    (verl #7014, #5801, AReaL #941, prime-rl #1901).
    Look at: `I12.distributed` for the sender and `I12.receive-distributed` for the receiver; this one needs both.
    """
    _verify_pair(subject, "distributed")


def _verify_pair(subject: EngineUnderTest, method: SyncMethod) -> None:
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    engine = subject.peer.serve(model, keep=False)
    for version, bucket_bytes in ((1, LARGE_BUCKET), (2, TINY_BUCKET)):
        train(group, subject, [version])
        sync_weights(group, engine, sync_meta(subject, method, version, bucket_bytes, verify=True), 120)
        responses = serving.ask(engine, serving.few_requests(subject))
        truth = subject.snapshot(group, model, f"truth-{version}")
        label = f"of tokens generated after sync {version}"
        serving.verify_served(subject, label, responses, truth, None, version)
