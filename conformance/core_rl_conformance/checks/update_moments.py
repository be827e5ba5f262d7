"""Weights that reach an inference engine at inconvenient moments: one update upon another, in a pause, and asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import cast

from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.deltas import DeltaSender, with_few_changes
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import Judged
from core_rl_conformance.inputs.covering import Combination, covering_array
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.adapters import send_adapter
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, methods_of, sent, sync_meta, tensors_of
from core_rl_conformance.profile import NAMED_APART

# Greedy, so that many answers are few sequences for the oracle.
SHORT = replace(serving.GREEDY, max_new_tokens=2)
LONGEST = 24
SEEDED = replace(serving.PLAIN, seed=0)
UPDATES, COPIES = 4, 4
BUFFERED = "gemma4_text"
"""A family with a buffer in its files."""
BUCKETS = {"one": LARGE_BUCKET, "many": 512}
"""Bytes of the buckets of an update: all weights of a tiny model, or less than many factors of an adapter have."""


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

    label = f"log-probs by the weights whose version tokens carry, during {UPDATES} updates"
    serving.verify_by_version(subject, label, responses, models)
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
        with ExitStack() as stack:
            if version == 3:
                engine.pause()
                stack.callback(engine.resume)
            sent(engine, sync_meta(subject, "tensor", version, LARGE_BUCKET), tensors[models[version]])
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


def _again(request: LLMRequest, tokens: int = SHORT.max_new_tokens) -> LLMRequest:
    """The same request with a rid of its own, and a number of tokens."""
    return LLMRequest(input_ids=request.input_ids, sampling=replace(request.sampling, max_new_tokens=tokens))


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


@check("I12.updates", kind="inference", requires={Capability.SYNC_DISK}, each="engine")
def updates_arrive_in_any_state(subject: EngineUnderTest) -> None:
    """After an update by any method, in any state, under any label, tokens and scores are of the new weights.

    Any two of: each declared method; whole weights or changes of all, some, one or no tensor, in one bucket or many;
    the engine awake, asleep, paused or with requests in flight; the next version, the same label again, or an earlier
    one; new weights, or those of before. The requests are the same each time, a seeded one too, and one goes on after
    an earlier answer. Answers in flight are complete, and their tokens have the version of the weights that drew them.
    Changes that follow others come without a full update. An engine that is asleep may refuse an update by
    `EngineStateError` or `WeightsError`, and serves the old weights under their version. So do buffers of a model whose
    files hold some, if the engine serves it.

    Why: answers and prefixes that are kept, or kept by a version's label, outlive an update (vllm #9744, NeMo-RL
    #4018); a delta that arrives asleep is lost; indices count from another tensor's start, and changes that are added
    are rounded (verl #7227, slime #1806); a tied head, or weights copied before a sleep, come from the update before
    (vllm #44371, verl #7014).
    Look at: the update that the message names; keys of caches, copies that ``release_memory`` makes, `DeltaDecoder`,
    and how its tensors come into the engine, buffers too.
    """
    options: dict[str, Sequence[str]] = {
        "method": methods_of(subject),
        "form": ["whole"] + ["changes"] * subject.spec.supports(Capability.SYNC_DELTA),
        "state": ["awake", "paused", "in flight"]
        + ["asleep"] * subject.spec.supports(Capability.RELEASE_MEMORY),
        "version": ["next", "same", "earlier"],
        "tensors": [*CHANGED, "those of before"],
        "buckets": list(BUCKETS),
    }
    # A receiver's base, and versions in flight, need updates of some order.
    usual = {"form": options["form"][-1], "version": "next"}
    begin = [
        {**usual, "method": method, "state": state, "tensors": tensors, "buckets": size}
        for method in options["method"]
        for state, tensors, size in (
            ("in flight", "all", "many"),
            ("awake", "a few values", "one"),
            ("awake", "none", "one"),
        )
    ]
    _verify_updates(subject, covering_array(options, subject.case.seed, begin=begin))
    if BUFFERED in CONFIG_MAPPING and not subject.case.target.model_dir:
        usual |= {"tensors": "all", "buckets": "one", "files": "with buffers"}
        states = ["awake", *options["state"][3:]]
        rows = [
            {**usual, "method": method, "form": form, "state": state}
            for method, form, state in product(options["method"], options["form"], states)
        ]
        _verify_updates(subject.of(replace(subject.case, family=BUFFERED)), rows, promised=False)


def _verify_updates(subject: EngineUnderTest, rows: Sequence[Combination], *, promised: bool = True) -> None:
    """Judge the updates ``rows`` of an engine of the case's model; none if it need not serve that, and does not."""
    old = subject.model()
    try:
        engine = subject.serve(old, keep=False)
        updates = Updates.begin(subject, engine, old)
    except (CoreRLError, AssertionError):
        if promised:
            raise
        return
    sender = DeltaSender(subject.expected.models.directory(old))
    last = sender.tensors
    for number, row in enumerate(rows):
        before, last, full = last, sender.tensors, sender.full_updates
        has_base = updates.has_base
        if row["tensors"] in CHANGED:
            sender.tensors = {**last, **CHANGED[row["tensors"]](last, number)}
        else:
            sender.tensors = before
        updates.install(
            row,
            sender.snapshot(subject.directory(f"truth-{old.family}-{number}")),
            partial(sync_weights, sender, engine, timeout_s=CALL_TIMEOUT_S),
        )
        if row["form"] == "changes" and has_base:
            subject.require(
                sender.full_updates == full, f"changes {updates.label} came with a full update, after changes"
            )


@check(
    "I12.adapter-updates",
    kind="inference",
    requires={Capability.SYNC_LORA},
    families=NAMED_APART,
    each="engine",
)
def adapters_arrive_in_any_state(subject: EngineUnderTest) -> None:
    """Before an adapter comes, the base draws; after an update by lora in any state, base and adapter draw every token.

    Also after an adapter that comes again, or with other factors B alone, or under a label that another one had, with
    requests in flight, and after cached prefixes.

    Why: servers scale by ``alpha / rank`` whatever the adapter declares; leave out factors of layers that they fuse;
    keep an adapter, its prefixes and its answers under the name of its version; report the new version for tokens of
    the old adapter (verl #7014, slime #327, AReaL #941).
    Look at: the scaling, fused projections, the name of an adapter, what is kept under it, and which adapter a request
    keeps.
    """
    kind = TinyAdapter(model=subject.model(), rslora=True)
    options = {
        "state": ["awake", "paused", "in flight"]
        + ["asleep"] * subject.spec.supports(Capability.RELEASE_MEMORY),
        "version": ["next", "same", "earlier"],
        "adapter": ["next", "same", "before", "other factors B"],
        "buckets": list(BUCKETS),
    }
    engine = subject.serve(kind.model, keep=False, adapter=kind)
    updates = Updates.begin(subject, engine, kind.model)
    adapters = [replace(kind, seed=seed) for seed in (1, 2)]
    begin = [
        {"state": "in flight", "version": "next", "adapter": "next", "buckets": size} for size in BUCKETS
    ]
    for number, row in enumerate(covering_array(options, subject.case.seed, begin=begin), start=3):
        last = adapters[-1]
        adapter = {
            "next": replace(kind, seed=number),
            "same": last,
            "before": adapters[-2],
            "other factors B": replace(last, strength=-last.strength),
        }[row["adapter"]]
        adapters.append(adapter)
        updates.install(row, adapter, partial(send_adapter, engine, adapter=adapter))


def _embedding(tensors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The largest matrix, with its rows moved."""
    name = max(tensors, key=lambda name: tensors[name].numel())
    return {name: tensors[name].roll(1 + number, 0)}


CHANGED: Mapping[str, Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]] = {
    "all": lambda tensors, number: {
        name: tensor * (0.8 if number % 2 else 1.25) for name, tensor in tensors.items()
    },
    "a few values": with_few_changes,
    "the embedding": _embedding,
    "none": lambda _tensors, _number: {},
}
"""The changes of an update."""


@dataclass(kw_only=True)
class Updates:
    """An engine after some updates."""

    subject: EngineUnderTest
    engine: InferenceEngine
    truth: Judged
    """The weights that it has."""
    requests: list[LLMRequest]
    continued: Sequence[LLMRequest] = ()
    number: int = 0
    label: str = "before the updates"
    has_base: bool = False
    """Whether the last update was one of changes, which arrived."""
    labels: dict[int, list[Judged]] = field(default_factory=dict)
    """All weights that it had under each version."""

    @staticmethod
    def begin(subject: EngineUnderTest, engine: InferenceEngine, truth: Judged) -> Updates:
        """The engine with its first weights, which has answered once."""
        data = subject.data().select(serving.FEW[:3])
        requests = serving.requests_for(data, serving.GREEDY, 20)
        requests[-1] = replace(requests[-1], sampling=SEEDED)
        updates = Updates(subject=subject, engine=engine, truth=truth, requests=requests)
        updates._verify(truth, 0)
        return updates

    def install(self, row: Combination, new: Judged, deliver: Callable[[WeightUpdateMeta], None]) -> None:
        """Update to the weights ``new`` as ``row`` requires, and judge the answers to the same requests."""
        self.number += 1
        shown = ", ".join(f"{name}: {value}" for name, value in row.items())
        self.label = f"after update {self.number} ({shown})"
        version = self.engine.get_version() + (row["version"] == "next")
        if row["version"] == "earlier":
            version = max(version - 1, 0)
            self.engine.set_version(version)
        old, before = self.truth, self.engine.get_version()
        meta = WeightUpdateMeta(
            method=cast("SyncMethod", row.get("method", "lora")),
            version=version,
            path=str(self.subject.directory(f"update-{self.subject.case.family}-{self.number}")),
            delta=row.get("form") == "changes",
            bucket_bytes=BUCKETS[row["buckets"]],
            verify=self.number % 2 == 0,
        )
        update = partial(deliver, meta)
        arrived = True
        if row["state"] == "asleep":
            arrived = serving.arrives_asleep(self.engine, update)
            self.label += "" if arrived else ", which was refused"
        elif row["state"] == "awake":
            update()
        else:
            again = [_again(request, LONGEST) for request in self.requests * COPIES]
            in_pause = row["state"] == "paused"
            responses = asyncio.run(serving.meanwhile(self.engine, again, update, in_pause=in_pause))
            self._verify_meanwhile(responses, {before: old, version: new})
        self.truth, carried = (new, version) if arrived else (old, before)
        self.has_base = arrived and meta.delta
        self._verify(old, carried)

    def _verify_meanwhile(self, responses: Sequence[LLMResponse], sides: Mapping[int, Judged]) -> None:
        """Require complete answers, with log-probs of the weights whose version tokens carry, where these differ."""
        short = [response for response in responses if len(response.output_ids) < LONGEST]
        problem = f"{self.label}: {len(short)} of {len(responses)} answers were cut short"
        self.subject.require(not short, problem)
        if len(sides) > 1:
            label = f"log-probs by the weights whose version tokens carry, {self.label}"
            serving.verify_by_version(self.subject, label, _distinct(responses), sides)

    def _verify(self, old: Judged, version: int) -> None:
        subject, engine, label = self.subject, self.engine, self.label
        serving.verify_version(subject, engine, version, label)
        # The very requests of the updates before, and an answer of the last weights that goes on.
        responses = serving.ask(engine, [*self.requests, *self.continued])
        self.continued = serving.requests_for(serving.sequences_of(responses[:1]), serving.GREEDY)
        earlier = [weights for weights in self.labels.setdefault(version, []) if weights != self.truth]
        serving.verify_served(subject, label, responses, self.truth, old, version, earlier)
        self.labels[version].append(self.truth)
        serving.verify_scores(subject, label, engine, serving.sequences_of(responses), self.truth, old)
