"""Engines that lose or mix up weights which go from one to the other in buckets, through memory or a process group."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.backend.tensors import TensorDict, check_source
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference.rollout import RECEIVE_TIMEOUT_S, ReferenceRolloutBackend
from core_rl.weight_sync.messages import Bucket
from core_rl.weight_sync.update import weight_update
from mutants.updates import Entries
from mutants.uploads import Sends, Whole
from mutants.zoo import Context, Mutant


class CollectsViews(Sends):
    """Exports pass through one buffer, and all of them are collected before the first is sent."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        buffer = torch.empty(1 << 20)
        yield from [(name, buffer[: full.numel()].view(full.shape).copy_(full)) for name, full in tensors]


class OverwritesWhatWasTaken(Sends):
    """The memory of a bucket that the receiver has acknowledged is used for the next one."""

    before: Bucket = []  # noqa: RUF012  # replaced, never changed

    def bucket_sent(self, bucket: Bucket) -> None:
        for (_, old), (_, new) in zip(self.before, bucket, strict=False):
            count = min(old.numel(), new.numel())
            old.view(-1)[:count].copy_(new.reshape(-1)[:count])
        self.before = bucket


class ForgetsTheLastBucket(Sends):
    """A bucket is sent when it is full, and the last one never is."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from [(name, tensor.clone()) for name, tensor in tensors][:-1]


class IgnoresStrides(Sends):
    """A transposed matrix is sent as it lies in memory."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        for name, tensor in tensors:
            moved = name.endswith("q_proj.weight")
            yield name, tensor.t().contiguous().view(tensor.shape) if moved else tensor


class SendsTheStepBefore(Sends):
    """The weights that are sent were gathered at the previous send."""

    gathered: list[tuple[str, Tensor]] | None = None

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        now = [(name, tensor.clone()) for name, tensor in tensors]
        before, self.gathered = self.gathered or now, now
        yield from before


class BroadcastsInAnotherOrder(Sends):
    """Tensors are announced by name and broadcast by size."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        full = [(name, tensor.clone()) for name, tensor in tensors]
        last: dict[tuple[int, ...], Tensor] = {}
        for name, tensor in full:  # among equal shapes, nobody notices
            yield name, last.get(tuple(tensor.shape), tensor)
            last[tuple(tensor.shape)] = tensor


class BroadcastsTheStepBefore(SendsTheStepBefore):
    """The broadcast weights were gathered for the previous update."""


class SendsTheStepBeforeToo(SendsTheStepBefore):
    """The same, for the check of a pair."""


class SendsTheTieTwice(Sends):
    """A tied head is sent in addition to the embedding."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        for name, tensor in tensors:
            yield name, tensor
            if name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor.clone()


class TakesFirstBuckets(ReferenceRolloutBackend):
    """The last tensors of an update do not arrive."""

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        state = dict(self._model.named_parameters())
        late = list(tensors)[-3:]
        super()._install_tensors(
            {
                name: state[name].detach().clone() if name in late else value
                for name, value in tensors.items()
            },
            version,
        )


class ServesFromTheBuckets(ReferenceRolloutBackend):
    """The weights are views of the memory that the sender gave, also after the update."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        with weight_update(meta).receive(RECEIVE_TIMEOUT_S) as received:
            tensors = {name: tensor for bucket in received for name, tensor in bucket}
            self._on_worker(self._install_tensors, tensors, meta.version)

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        for name, value in self._model.named_parameters():
            value.data = tensors[name]
        self._served_version = version


class KeepsTheVersion(ReferenceRolloutBackend):
    """New weights draw under the label of the old ones."""

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        before = self._served_version
        super()._install_tensors(tensors, version)
        self._served_version = before


class LabelsAsItReceives(ReferenceRolloutBackend):
    """The version changes when the first tensors arrive."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.method != "disk":
            self._served_version = meta.version
        super().update_weights(meta)


class InstallsAsItComes(ReferenceRolloutBackend):
    """Each bucket is copied into the weights that serve."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        with weight_update(meta).receive_copies(RECEIVE_TIMEOUT_S) as received:
            state = dict(self._model.named_parameters())
            full = {}
            for bucket in received:
                with torch.no_grad():
                    for name, tensor in bucket:
                        full[name] = tensor
                        if tensor.shape == state[name].shape:
                            state[name].copy_(tensor)
            self._on_worker(self._install_tensors, full, meta.version)


class Answering(ReferenceRolloutBackend):
    """Base for engines that answer requests in the middle of an update: an event marks the end."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._may_begin, self._answered = threading.Event(), threading.Event()
        self._may_begin.set()
        return super().build(context, addresses, ft_spec)

    def _complete(self, entries: Entries) -> None:
        self._may_begin.wait()
        super()._complete(entries)
        self._answered.set()


class ResumesBeforeTheRestore(Answering):
    """Requests wait while buckets are copied into the weights; after an error they continue before the restore."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        served = dict(self._model.named_parameters())
        old = {name: value.detach().clone() for name, value in served.items()}
        self._on_worker(self._may_begin.clear)  # after the requests in flight
        self._answered.clear()
        try:
            with weight_update(meta).receive_copies(RECEIVE_TIMEOUT_S) as received, torch.no_grad():
                tensors: dict[str, Tensor] = {}
                for bucket in received:
                    tensors.update(bucket)
                    for name, tensor in bucket:
                        if tensor.shape == served[name].shape:
                            served[name].copy_(tensor)
                check_source(
                    TensorDict(tensors), {n: tuple(v.shape) for n, v in served.items()}, "the weights"
                )
            self._served_version = meta.version
            self._may_begin.set()
        except BaseException:
            self._may_begin.set()
            self._answered.wait(RECEIVE_TIMEOUT_S)
            self._on_worker(self._install_tensors, old, self._served_version)
            raise


class LabelsAnUpdateThatFails(Answering):
    """The version is that of an update from its first bucket on, and the old one again when the update has failed."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before, self._served_version = self._served_version, meta.version
        self._answered.clear()
        try:
            super().update_weights(meta)
        except BaseException:
            self._answered.wait(RECEIVE_TIMEOUT_S)
            self._served_version = before
            raise


class MissesTheLastBroadcasts(TakesFirstBuckets):
    """The last tensors of a group's update do not arrive."""


class InstallsAsItIsBroadcast(InstallsAsItComes):
    """Each broadcast is copied into the weights that serve."""


SENT, RECEIVED = "I12.tensor", "I12.receive-tensor"
MUTANTS = (
    Mutant(
        engine=CollectsViews,
        killed_by=SENT,
        issue="verl #6813: what was sent first is overwritten",
        says="parameters sent after step 1",
    ),
    Mutant(
        engine=OverwritesWhatWasTaken,
        killed_by=SENT,
        issue="verl #6813: a bucket that is overwritten after it was taken",
        says="parameters sent after step 2 in buckets of 4096 bytes",
    ),
    Mutant(
        engine=ForgetsTheLastBucket,
        killed_by=SENT,
        issue="a bucket that nobody flushes (I12)",
        says="parameters sent after step 1",
    ),
    Mutant(engine=IgnoresStrides, killed_by=SENT, issue="verl #6919", says="parameters sent after step 1"),
    Mutant(
        engine=SendsTheStepBefore, killed_by=SENT, issue="verl #7014", says="parameters sent after step 2"
    ),
    Mutant(
        engine=SendsTheTieTwice,
        killed_by=SENT,
        issue="both copies of a tied matrix (I12)",
        says=r"parameters sent after step 1 .*other names[\s\S]*a tied tensor comes once.: lm_head.weight",
        family="qwen3",
    ),
    Mutant(
        engine=SendsTheStepBeforeToo,
        killed_by="I12.sync-tensor",
        issue="verl #7014",
        says="generated after sync 2",
        partner=ROLLOUT_SPEC,
    ),
    Mutant(
        engine=TakesFirstBuckets,
        killed_by=RECEIVED,
        issue="verl #5801: some of the tensors",
        says="log-probs by the weights whose version tokens carry|after the update to version 1",
    ),
    Mutant(
        engine=ServesFromTheBuckets,
        killed_by=RECEIVED,
        issue="weights that are views of memory which the sender uses again (I12)",
        says="log-probs after the update to version 1",
    ),
    Mutant(
        engine=KeepsTheVersion, killed_by=RECEIVED, issue="AReaL #941", says=r"versions \[0\]|\[0\], not 1"
    ),
    Mutant(
        engine=LabelsAsItReceives,
        killed_by=RECEIVED,
        issue="slime #327",
        says="by the weights whose version tokens carry",
    ),
    Mutant(
        engine=InstallsAsItComes,
        killed_by="I12.broken-stream",
        issue="a trainer that dies in the middle of an update (I12)",
        says="(during|after) an update that breaks off",
    ),
    Mutant(
        engine=ResumesBeforeTheRestore,
        killed_by="I12.broken-stream",
        issue="requests that continue while an update is undone (I12)",
        says="log-probs during an update that breaks off",
    ),
    Mutant(
        engine=LabelsAnUpdateThatFails,
        killed_by="I12.broken-stream",
        issue="a version that never existed (I12)",
        says=r"versions \[2\]",
    ),
    Mutant(
        engine=BroadcastsInAnotherOrder,
        killed_by="I12.distributed",
        issue="AReaL #941: ranks that do not agree on the order of tensors",
        says="parameters sent after step 1",
    ),
    Mutant(
        engine=BroadcastsTheStepBefore,
        killed_by="I12.sync-distributed",
        issue="verl #7014",
        says="generated after sync 2",
        partner=ROLLOUT_SPEC,
    ),
    Mutant(
        engine=MissesTheLastBroadcasts,
        killed_by="I12.receive-distributed",
        issue="verl #5801: some of the tensors",
        says="log-probs by the weights whose version tokens carry|after the update to version 1",
    ),
    Mutant(
        engine=InstallsAsItIsBroadcast,
        killed_by="I12.broken-group",
        issue="a trainer that dies in the middle of an update (I12)",
        says="(during|after) an update that breaks off",
    ),
)
