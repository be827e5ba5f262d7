"""Adapters that go from engine to engine by themselves (``lora``), over a base that both have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMResponse
from core_rl.engine.sync import sync_weights
from core_rl.errors import WeightsError
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import Judged
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.adapters import (
    adapter_of,
    factors_of,
    metadata_of,
    send_adapter,
    snapshot_of,
    start,
)
from core_rl_conformance.procedures.moving import train
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sent, sync_meta
from core_rl_conformance.profile import NAMED_APART

TINY_BUCKET = 512
"""Less than many factors of a tiny model have."""


def _meta(subject: EngineUnderTest, version: int, bucket_bytes: int = LARGE_BUCKET) -> WeightUpdateMeta:
    return sync_meta(subject, "lora", version, bucket_bytes, verify=True)


@check("I12.lora", requires={Capability.SYNC_LORA, Capability.LORA})
def adapter_sync_sends_the_present_adapter(subject: EngineUnderTest) -> None:
    """``upload_weights`` by lora sends the two factors of each adapted layer, as they are after the last step or load.

    Nothing else is sent: base weights stay where they are. The sender also reports rank, alpha and rsLoRA, and with
    ``verify`` the base of the adapter.

    Why: a factor that is left out, or an adapter of the step before, is an untrained policy; base weights
    that travel along cost what adapters save (verl #7014, prime-rl #1901).
    Look at: ``named_tensors("adapter")``, and `I12.tensor`, which sends all weights the same way.
    """
    adapter = TinyAdapter(model=subject.model(), rslora=True, some=True)
    group = start(subject, adapter, optimizer={"lr": 1e-2})
    group.set_version(3)
    bases = set()
    for version, bucket_bytes in ((4, LARGE_BUCKET), (5, TINY_BUCKET)):
        before = adapter_of(group.named_tensors("master"))
        train(group, subject, [version])
        sent_update = caught(group, _meta(subject, version, bucket_bytes))
        names = [name for bucket in sent_update.buckets for name in bucket]
        subject.require(len(names) == len(set(names)), f"a factor comes twice: {sorted(names)}")
        label = f"factors sent after step {version - 3} in buckets of {bucket_bytes} bytes"
        present = adapter_of(group.named_tensors("master"))
        subject.verify_same(label, sent_update.tensors, present, since=before)
        metadata = sent_update.adapter
        subject.require(
            metadata is not None
            and (metadata.rank, metadata.alpha, metadata.rslora) == (adapter.rank, adapter.alpha, True),
            f"the sender says {metadata}, and the adapter has rank {adapter.rank}, alpha {adapter.alpha} and rsLoRA",
        )
        bases |= {metadata.base if metadata is not None else None}
    subject.require(len(bases) == 1 and None not in bases, f"the digests of the base are {bases}; it is one")
    serving.verify_version(subject, group, 3, "after uploading an adapter")


def _verify_drawn(
    subject: EngineUnderTest,
    label: str,
    responses: list[LLMResponse],
    model: TinyModel,
    sides: Mapping[int, Judged],
    before: Judged | None = None,
) -> None:
    """Verify that each token has the log-prob of the adapter in ``sides`` whose version it carries."""
    logprobs = partial(serving.oracle_outputs, subject, responses=responses, name="logprobs")
    guesses = {
        "log-probs of the base, without the adapter": partial(logprobs, model),
        "log-probs of the adapter before": partial(logprobs, before or model),
    }
    serving.verify_by_version(subject, f"log-probs of tokens drawn {label}", responses, sides, guesses)


@check(
    "I12.broken-lora", kind="inference", requires={Capability.SYNC_LORA}, families=NAMED_APART, each="engine"
)
def adapters_that_do_not_fit_change_nothing(subject: EngineUnderTest) -> None:
    """An adapter of another scaling or base, or without a factor, is refused, and the adapter before serves on.

    Why: factors have the same shapes over any base and with any scaling: only the policy shows the difference.
    A server may die of a wrong shape, and takes a missing factor for zeros.
    Look at: comparisons before a server gets the adapter.
    """
    kind = TinyAdapter(model=subject.model(), rslora=True)
    engine = subject.serve(kind.model, keep=False, adapter=kind)
    requests = serving.few_requests(subject)
    old = replace(kind, seed=2)
    send_adapter(engine, _meta(subject, 2), old)
    for number, (label, (factors, metadata)) in enumerate(_misfits(replace(kind, seed=3)).items()):
        give = partial(sent, engine, _meta(subject, 3 + number, TINY_BUCKET), factors, metadata)
        subject.require_error(WeightsError, give, f"an adapter {label} did not raise a WeightsError")
        serving.verify_version(subject, engine, 2, f"after an adapter {label}")
        _verify_drawn(
            subject, f"after an adapter {label}", serving.ask(engine, requests), kind.model, {2: old}
        )
    new = replace(kind, seed=4)
    send_adapter(engine, _meta(subject, 20), new)
    _verify_drawn(subject, "after one that fits", serving.ask(engine, requests), kind.model, {20: new}, old)


def _misfits(adapter: TinyAdapter) -> dict[str, tuple[dict[str, Tensor], AdapterMetadata]]:
    factors, metadata = factors_of(adapter), metadata_of(adapter)
    last = list(factors)[-1]
    return {
        "of another alpha": (factors, replace(metadata, alpha=adapter.alpha + 1)),
        "without rsLoRA": (factors, replace(metadata, rslora=False)),
        "over another base": (factors, replace(metadata, base="0" * 32)),
        "without a factor": ({name: value for name, value in factors.items() if name != last}, metadata),
        "with a wrong shape": ({**factors, last: factors[last][:-1]}, metadata),
    }


@check(
    "I12.sync-lora",
    partner="inference",
    requires={Capability.SYNC_LORA, Capability.LORA},
    partner_requires={Capability.SYNC_LORA},
    families=NAMED_APART,
    each="engine",
)
def trained_adapters_arrive(subject: EngineUnderTest) -> None:
    """After each step and sync by lora, the rollout engine draws from the base and the adapter that is trained.

    Also where the adapter is on some layers only.

    Why: an adapter of the previous step, or with a wrong scale, is an untrained
    policy (verl #7014).
    Look at: `I12.lora` for the sender and `I12.adapter-updates` for the receiver; this one needs both.
    """
    adapter = TinyAdapter(model=subject.model(), some=True)
    group = start(subject, adapter, optimizer={"lr": 1e-1})
    engine = subject.peer.serve(adapter.model, keep=False, adapter=adapter)
    before: Judged = adapter.model
    for version, bucket_bytes in ((1, LARGE_BUCKET), (2, TINY_BUCKET)):
        train(group, subject, [version])
        sync_weights(group, engine, _meta(subject, version, bucket_bytes), 120)
        responses = serving.ask(engine, serving.few_requests(subject))
        trained = {version: snapshot_of(subject, adapter, group)}
        _verify_drawn(subject, f"after sync {version}", responses, adapter.model, trained, before)
        before = trained[version]
