"""Delta weight sync: only changes are sent, and the receiver has the sender's weights bit for bit."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors, TensorDict
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.config.capability import Capability
from core_rl.distributed.comm import Comm
from core_rl.engine.delta_files import write_changes
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import DeltaRefused, WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.weight_sync.delta import BASE, DIGEST, DeltaDecoder, DeltaEncoder
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import Snapshot
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.moving import elsewhere, load_weights, train
from core_rl_conformance.procedures.streaming import caught, delivered, methods_of, tensors_of

TINY_BUCKET = 4096
BYTES_PER_CHANGE = 16
"""The most bytes of an index and its value."""
SHARE = 0.03
"""Places of a tensor that a change of few values is about."""


class DeltaSender:
    """Sends ``tensors`` by any method as a train engine does; others of the directory's files go along by ``disk``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tensors = tensors_of(directory)
        self.changes = DeltaEncoder()
        self.full_updates = 0
        self.spoils_digest = False

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the tensors, or with ``delta`` their changes since the last update; returns when they are sent."""
        if meta.rebase or not meta.delta:
            self.changes.forget()
        base = self.changes.base
        self.full_updates += base is None
        if meta.method != "disk":
            weight_update(meta, base=base).send(self._encoded() if meta.delta else self.tensors.items())
        elif base is None:
            write = partial(self._write, self.changes.recorded(self.tensors.items()))
            write_checkpoint(meta.path or "", write, Comm(), kind="hf")
        else:
            write_changes(meta.path or "", self._encoded(), Comm(), is_writer=True)
        if meta.delta:
            self.changes.commit(meta.version)

    def skip(self, version: int) -> None:
        """Send an update that no receiver gets."""
        deque(self._encoded(), maxlen=0)
        self.changes.commit(version)

    def _encoded(self) -> NamedTensors:
        for name, tensor in self.changes.encode(self.tensors.items()):
            spoils = name == DIGEST and self.spoils_digest
            yield name, tensor.flip(0) if tensor is not None and spoils else tensor

    def _write(self, tensors: NamedTensors, directory: Path) -> None:
        for file in self._directory.iterdir():
            if not file.name.startswith("model"):
                shutil.copy(file, directory)
        write_tensors(directory, "model", tensors, writes=True)

    def snapshot(self, path: Path) -> Snapshot:
        """The present tensors in the directory ``path``, to expect values of."""
        path.mkdir()
        self._write(iter(self.tensors.items()), path)
        return Snapshot(path)


def with_few_changes(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Copies with other values in some places of each tensor, the last one among them."""
    draw = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        new = tensor.clone()
        mask = torch.rand(tensor.numel(), generator=draw) < SHARE
        mask[-1:] = True
        values = torch.rand(int(mask.sum()), generator=draw) - 0.5
        values[::2] *= 1e-3  # a difference to the old value rounds these
        new.view(-1)[mask] = values.to(tensor.dtype)
        changed[name] = new
    return changed


def _meta(subject: EngineUnderTest, method: SyncMethod, version: int) -> WeightUpdateMeta:
    path = subject.directory(f"delta-{method}")
    return WeightUpdateMeta(
        method=method, version=version, path=str(path), delta=True, bucket_bytes=TINY_BUCKET
    )


@check("I12.delta", requires={Capability.SYNC_TENSOR}, each="layout")
def deltas_are_the_present_weights(subject: EngineUnderTest) -> None:
    """``upload_weights`` with ``delta`` sends changes that make the previous update the present weights, bit for bit.

    The first update is full, and so is an update after a failed one. Few changed values come by index, and without a
    change nothing comes.

    Why: a copy of the weights that is older or newer than those of the receiver gives changes that fit no weights, and
    the receiver drifts away without an error.
    Look at: ``named_tensors("params")``, whose tensors are valid until the next item; `I12.tensor` first.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    decoder = DeltaDecoder()

    def verify(label: str, version: int, full: bool) -> tuple[frozenset[str], int]:
        """Names of the tensors that came, and their bytes."""
        sent = caught(group, _meta(subject, "tensor", version), decoder.base).tensors
        kind = "a delta" if BASE in sent else "full"
        subject.require((kind == "full") == full, f"the update after {label} is {kind}")
        weights = decoder.decode(sent.items())
        decoder.commit(weights, version)
        expected = {name: value.to(subject.dtype) for name, value in group.named_tensors("master").items()}
        params = {name: value for name, value in weights.tensors.items() if name in expected}
        subject.verify_same(f"weights after the update after {label}", params, expected)
        return weights.changed, sum(sent[name].nbytes for name in sent.keys() - {BASE, DIGEST})

    verify("the start", 1, full=True)
    train(group, subject, [1])
    verify("step 1", 2, full=False)
    changed, _ = verify("no step", 3, full=False)
    subject.require(not changed, f"nothing changed, and {sorted(changed)} came")
    count = _change_few(group)
    _, nbytes = verify("a change of few values", 4, full=False)
    most = BYTES_PER_CHANGE * count
    subject.require(nbytes <= most, f"{count} values changed, and {nbytes} bytes came, not {most}")
    load_weights(subject, group, elsewhere(model))
    verify("a load", 5, full=False)
    train(group, subject, [2])
    error = WeightsError("the update is lost")
    lost = partial(caught, group, _meta(subject, "tensor", 6), decoder.base, error)
    subject.require_error(WeightsError, lost, "an update that its receiver loses did not raise")
    verify("an update that was lost", 7, full=True)


def _change_few(group: EngineGroup) -> int:
    """Set three values of the largest matrix, the first and the last among them; returns their number."""
    weights = group.named_tensors("master")
    name = max(weights, key=lambda name: weights[name].numel())
    places = torch.tensor([0, weights[name].numel() // 2, weights[name].numel() - 1])
    weights[name].view(-1)[places] += 1
    group.load_named_tensors("master", TensorDict(weights))
    return len(places)


@check("I12.delta-base", kind="inference", requires={Capability.SYNC_DELTA}, each="engine")
def changes_of_other_weights_are_refused(subject: EngineUnderTest) -> None:
    """Changes of weights that the engine does not have are refused with `DeltaRefused`, and a full update follows.

    The engine has no weights of a delta update, has missed an update, or has weights of another sender; or the digest
    of all weights differs afterwards. It serves the old weights until then.

    Why: a server that was restarted, or that missed an update, takes changes of other weights and is a policy of its
    own from then on, under the version of the trainer.
    Look at: the base of an update, which is compared before anything is changed, and the digest after it.
    """
    old = subject.model()
    engine = subject.serve(old, keep=False)
    for method in methods_of(subject):
        sender = DeltaSender(subject.expected.models.directory(elsewhere(old)))
        for number, label in enumerate(("that it never had", "that it has missed", "with another digest")):
            version = engine.get_version()
            before = serving.ask(engine, requests := serving.few_requests(subject, serving.GREEDY))
            sender.spoils_digest = label == "with another digest"
            if not sender.spoils_digest:
                sender.tensors = with_few_changes(sender.tensors, seed=number)
                sender.skip(version + 1)
            sender.tensors = with_few_changes(sender.tensors, seed=10 + number)
            refused = partial(_once, sender, engine, _meta(subject, method, version + 2))
            problem = f"changes of weights {label} by {method} did not raise a DeltaRefused"
            subject.require_error(DeltaRefused, refused, problem)
            when = f"after changes of weights {label} were refused by {method}"
            serving.verify_version(subject, engine, version, when)
            same = [answer.output_ids for answer in serving.ask(engine, requests)]
            expected = [answer.output_ids for answer in before]
            subject.require(same == expected, f"greedy answers differ {when}")
            sender.spoils_digest = False
            sync_weights(sender, engine, _meta(subject, method, version + 3), CALL_TIMEOUT_S)
            truth = sender.snapshot(subject.directory(f"truth-{version + 3}"))
            responses = serving.ask(engine, serving.few_requests(subject))
            serving.verify_served(subject, f"of a full update {when}", responses, truth, None, version + 3)


def _once(sender: DeltaSender, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
    """One update, without a full update after it; raises the receiver's error."""
    if meta.method == "disk":
        sender.upload_weights(meta)
        serving.installed(engine, meta)
    else:
        delivered(engine, meta, partial(sender.upload_weights, meta))


@check(
    "I12.sync-delta",
    partner="inference",
    requires={Capability.SYNC_DISK},
    partner_requires={Capability.SYNC_DISK, Capability.SYNC_DELTA},
    each="engine",
)
def trained_weights_arrive_by_delta(subject: EngineUnderTest) -> None:
    """After each step and sync with ``delta``, the rollout engine draws from the weights that the train engine has.

    By one method after the other, also after an update that went elsewhere.

    Why: two copies of the weights, at the sender and at the receiver, must stay equal over the whole run.
    Look at: `I12.delta` for the sender and `I12.updates` for the receiver; this one needs both.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    engine = subject.peer.serve(model, keep=False)
    methods = [method for method in methods_of(subject) if method in methods_of(subject.peer)]
    series: list[SyncMethod | None] = [methods[0], *methods, None, methods[-1]]
    for version, method in enumerate(series, start=1):
        train(group, subject, [version])
        if method is None:
            elsewhere_only = replace(
                _meta(subject, "disk", version), path=str(subject.directory("elsewhere"))
            )
            group.upload_weights(elsewhere_only)
            continue
        sync_weights(group, engine, _meta(subject, method, version), CALL_TIMEOUT_S)
        responses = serving.ask(engine, serving.few_requests(subject))
        truth = subject.snapshot(group, model, f"truth-{version}")
        label = f"of tokens generated after sync {version} by {method}"
        serving.verify_served(subject, label, responses, truth, None, version)
