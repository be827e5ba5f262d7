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


@Mutant("I12.tensor", "verl #6813: what was sent first is overwritten", "parameters sent after step 1")
class CollectsViews(Sends):
    """Exports pass through one buffer, and all of them are collected before the first is sent."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        buffer = torch.empty(1 << 20)
        yield from [(name, buffer[: full.numel()].view(full.shape).copy_(full)) for name, full in tensors]


@Mutant(
    "I12.tensor",
    "verl #6813: a bucket that is overwritten after it was taken",
    "parameters sent after step 2 in buckets of 4096 bytes",
)
class OverwritesWhatWasTaken(Sends):
    """The memory of a bucket that the receiver has acknowledged is used for the next one."""

    before: Bucket = []  # noqa: RUF012  # replaced, never changed

    def bucket_sent(self, bucket: Bucket) -> None:
        for (_, old), (_, new) in zip(self.before, bucket, strict=False):
            count = min(old.numel(), new.numel())
            old.view(-1)[:count].copy_(new.reshape(-1)[:count])
        self.before = bucket


@Mutant("I12.tensor", "a bucket that nobody flushes (I12)", "parameters sent after step 1")
class ForgetsTheLastBucket(Sends):
    """A bucket is sent when it is full, and the last one never is."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from [(name, tensor.clone()) for name, tensor in tensors][:-1]


@Mutant("I12.tensor", "verl #6919", "parameters sent after step 1")
class IgnoresStrides(Sends):
    """A transposed matrix is sent as it lies in memory."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        for name, tensor in tensors:
            moved = name.endswith("q_proj.weight")
            yield name, tensor.t().contiguous().view(tensor.shape) if moved else tensor


@Mutant("I12.tensor", "verl #7014", "parameters sent after step 2")
class SendsTheStepBefore(Sends):
    """The weights that are sent were gathered at the previous send."""

    gathered: list[tuple[str, Tensor]] | None = None

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        now = [(name, tensor.clone()) for name, tensor in tensors]
        before, self.gathered = self.gathered or now, now
        yield from before


@Mutant(
    "I12.distributed",
    "AReaL #941: ranks that do not agree on the order of tensors",
    "parameters sent after step 1",
)
class BroadcastsInAnotherOrder(Sends):
    """Tensors are announced by name and broadcast by size."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        full = [(name, tensor.clone()) for name, tensor in tensors]
        last: dict[tuple[int, ...], Tensor] = {}
        for name, tensor in full:  # among equal shapes, nobody notices
            yield name, last.get(tuple(tensor.shape), tensor)
            last[tuple(tensor.shape)] = tensor


@Mutant("I12.sync-distributed", "verl #7014", "generated after sync 2", partner=ROLLOUT_SPEC)
class BroadcastsTheStepBefore(SendsTheStepBefore):
    """The broadcast weights were gathered for the previous update."""


@Mutant("I12.sync-tensor", "verl #7014", "generated after sync 2", partner=ROLLOUT_SPEC)
class SendsTheStepBeforeToo(SendsTheStepBefore):
    """The same, for the check of a pair."""


@Mutant(
    "I12.tensor",
    "both copies of a tied matrix (I12)",
    r"parameters sent after step 1 .*other names[\s\S]*a tied tensor comes once.: lm_head.weight",
    family="qwen3",
)
class SendsTheTieTwice(Sends):
    """A tied head is sent in addition to the embedding."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        for name, tensor in tensors:
            yield name, tensor
            if name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor.clone()


@Mutant(
    "I12.receive-tensor",
    "verl #5801: some of the tensors",
    "log-probs by the weights whose version tokens carry|after the update to version 1",
)
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


@Mutant(
    "I12.receive-tensor",
    "weights that are views of memory which the sender uses again (I12)",
    "log-probs after the update to version 1",
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


@Mutant("I12.receive-tensor", "AReaL #941", r"versions \[0\]|\[0\], not 1")
class KeepsTheVersion(ReferenceRolloutBackend):
    """New weights draw under the label of the old ones."""

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        before = self._served_version
        super()._install_tensors(tensors, version)
        self._served_version = before


@Mutant("I12.receive-tensor", "slime #327", "by the weights whose version tokens carry")
class LabelsAsItReceives(ReferenceRolloutBackend):
    """The version changes when the first tensors arrive."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.method != "disk":
            self._served_version = meta.version
        super().update_weights(meta)


@Mutant(
    "I12.broken-stream",
    "a trainer that dies in the middle of an update (I12)",
    "(during|after) an update that breaks off",
)
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


@Mutant(
    "I12.broken-stream",
    "requests that continue while an update is undone (I12)",
    "log-probs during an update that breaks off",
)
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


@Mutant("I12.broken-stream", "a version that never existed (I12)", r"versions \[2\]")
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


@Mutant(
    "I12.receive-distributed",
    "verl #5801: some of the tensors",
    "log-probs by the weights whose version tokens carry|after the update to version 1",
)
class MissesTheLastBroadcasts(TakesFirstBuckets):
    """The last tensors of a group's update do not arrive."""


@Mutant(
    "I12.broken-group",
    "a trainer that dies in the middle of an update (I12)",
    "(during|after) an update that breaks off",
)
class InstallsAsItIsBroadcast(InstallsAsItComes):
    """Each broadcast is copied into the weights that serve."""
