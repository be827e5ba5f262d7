"""Engines that send or apply changes of other weights than the other side has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.engine.components import Persistence, TrainComponents
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.engine.step import TrainStep
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from core_rl.weight_sync.delta import DeltaDecoder, DeltaEncoder
from mutants.bases import inside
from mutants.zoo import Context, Mutant

SMALL = 64
"""Elements of a small tensor."""


class Decodes(ReferenceRolloutBackend):
    """Base for engines with a decoder of their own."""

    decoder: type[DeltaDecoder]

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        self._received = self.decoder()
        return limits


class UnverifiedDecoder(DeltaDecoder):
    """Compares no digest."""

    @staticmethod
    def verify(digests: Mapping[str, bytes], sent: Tensor | None) -> None:
        """Accept all weights."""


@Mutant(
    "I12.delta-base",
    "weights that differ after an update serve on (I12)",
    "with another digest by disk did not raise a DeltaRefused",
)
class IgnoresTheDigest(Decodes):
    """The digest after an update is not compared."""

    decoder = UnverifiedDecoder


@Mutant(
    "I12.delta-base",
    "a server that was restarted takes changes of other weights (I12)",
    "did not raise a DeltaRefused",
)
@inside(Decodes, "decoder")
class AppliesToAnyBase(UnverifiedDecoder):
    """Changes are applied to the present weights, whatever they are changes of."""

    def require(self, digest: str) -> None:
        """Accept all bases where there are weights."""
        if self.base is None:
            super().require(digest)


@Mutant("I12.updates", "verl #7227: indices of another shard", "form: changes")
@inside(Decodes, "decoder")
class ShiftsIndices(UnverifiedDecoder):
    """Indices are off by one within a tensor."""

    @staticmethod
    def replaced(name: str, before: Mapping[str, Tensor], gaps: Tensor | None, values: Tensor) -> Tensor:
        """The changes at shifted places."""
        old, new = before[name], DeltaDecoder.replaced(name, before, gaps, values)
        places = (new != old).reshape(-1).nonzero().squeeze(1)
        shifted = old.clone()
        shifted.view(-1)[(places + 1) % old.numel()] = new.reshape(-1)[places]
        return shifted


@Mutant("I12.updates", "slime #1806: differences that are added are rounded", "came with a full update")
@inside(Decodes, "decoder")
class AddsInsteadOfSetting(DeltaDecoder):
    """Differences are added to the weights: the sum is off by a rounding."""

    @staticmethod
    def replaced(name: str, before: Mapping[str, Tensor], gaps: Tensor | None, values: Tensor) -> Tensor:
        """The sum of the old values and of differences."""
        new = DeltaDecoder.replaced(name, before, gaps, values)
        return before[name] + (new - before[name])


@Mutant("I12.updates", "verl #5801: some of the tensors", "form: changes")
@inside(Decodes, "decoder")
class SkipsSmallTensors(UnverifiedDecoder):
    """Changes of norms and biases are left out."""

    @staticmethod
    def replaced(name: str, before: Mapping[str, Tensor], gaps: Tensor | None, values: Tensor) -> Tensor:
        """The old tensor, where it is small."""
        small = before[name].numel() < SMALL
        return before[name] if small else DeltaDecoder.replaced(name, before, gaps, values)


@Mutant("I12.updates", "an update that is always full (I12)", "came with a full update")
class NeverHasABase(ReferenceRolloutBackend):
    """The weights of an update are not kept, so that each update is full."""

    def _install_changes(self, items: Iterable[tuple[str, Tensor]], meta: WeightUpdateMeta) -> None:
        super()._install_changes(items, meta)
        self._received.forget()


class BuffersStay(ReferenceRolloutBackend):
    """Updates leave buffers as they are, whatever the files hold."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before = {name: value.clone() for name, value in self._model.named_buffers()}
        super().update_weights(meta)
        for name, value in self._model.named_buffers() if self.leaves(meta) else ():
            value.copy_(before[name])

    def leaves(self, meta: WeightUpdateMeta) -> bool:
        """Whether the update is such a one."""
        raise NotImplementedError


@Mutant("I12.updates", "parameters alone, by disk (I12)", "files: with buffers.*method: disk")
class BuffersStayByDisk(BuffersStay):
    """So do all by disk."""

    def leaves(self, meta: WeightUpdateMeta) -> bool:
        return meta.method == "disk"


@Mutant("I12.updates", "parameters alone, in changes (I12)", "form: changes.*files: with buffers")
class BuffersStayInDeltas(BuffersStay):
    """So do changes."""

    def leaves(self, meta: WeightUpdateMeta) -> bool:
        return meta.delta


class SkippingEncoder(DeltaEncoder):
    """Sends no small tensor again."""

    def _changes(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name not in self._tensors or tensor.numel() >= SMALL:
            yield from super()._changes(name, tensor)


class EncodedUploads(Persistence):
    """Uploads with the encoder of the backend."""

    def __init__(self, runtime: Runtime, modes: Modes, step: TrainStep) -> None:
        super().__init__(runtime, modes, step)
        assert isinstance(runtime.backend, Encodes)
        self.changes = runtime.backend.encoder()


class Encodes(ReferenceBackend):
    """Base for engines with an encoder of their own."""

    components = TrainComponents(persistence=EncodedUploads)
    encoder: type[DeltaEncoder]


@Mutant("I12.delta", "verl #5801: some of the tensors", "weights after the update after step 1")
class SendsNoSmallChanges(Encodes):
    """Changes of norms and biases are not sent."""

    encoder = SkippingEncoder


@Mutant(
    "I12.sync-delta",
    "verl #5801: some of the tensors",
    "log-probs of tokens generated after sync",
    partner=ROLLOUT_SPEC,
)
class SendsNoSmallChangesToAPeer(SendsNoSmallChanges):
    """The same, for the check of a pair."""


@Mutant(
    "I12.delta",
    "a comparison with a tolerance loses small steps (I12)",
    "weights after the update after step 1",
)
@inside(Encodes, "encoder")
class SendsLargeChangesOnly(DeltaEncoder):
    """Tensors that are nearly the same are taken for the same."""

    def _changes(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        before = self._tensors.get(name)
        if before is None or not torch.allclose(before, tensor, atol=2e-2):
            yield from super()._changes(name, tensor)


@Mutant(
    "I12.delta",
    "a sender that takes a failed update for a received one (I12)",
    "differ from the sender's|an update that was lost is a delta",
)
@inside(Encodes, "encoder")
class HasTheBaseOfAFailure(DeltaEncoder):
    """After a failed update the changes are since the weights of that update."""

    def encode(self, stream: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        base = self.base
        yield from super().encode(stream)
        self.base = base
