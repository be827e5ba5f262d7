"""Engines that lose, mix up or mislabel adapters which go from one to the other by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.weight_sync.messages import AdapterMetadata
from mutants.streams import SendsTheStepBefore
from mutants.uploads import Sends, Whole
from mutants.zoo import Mutant


class LeavesOutAFactor(Sends):
    """One factor of the last layer is not sent."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from [(name, tensor.clone()) for name, tensor in tensors][:-1]


class SendsTheAdapterBefore(SendsTheStepBefore):
    """The adapter that is sent was gathered at the previous send."""


class SendsTheAdapterBeforeToo(SendsTheAdapterBefore):
    """The same, for the check of a pair."""


class SendsTheBaseToo(Sends):
    """Base weights travel along."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from tensors
        yield from ((part.name, part.tensor) for part in self.state().local("params"))


class FoldsTheScaleIn(Sends):
    """The second factor is sent with the scale in it, by which the receiver multiplies again."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        lora = self.context.config.model.lora
        assert lora is not None
        for name, tensor in tensors:
            yield name, tensor * lora.alpha / lora.rank if ".lora_B." in name else tensor


class SaysAnotherScale(Sends):
    """An adapter with rsLoRA is announced as one without."""

    def described(self, adapter: AdapterMetadata) -> AdapterMetadata:
        return replace(adapter, rslora=False)


class DropsRslora(ReferenceRolloutBackend):
    """Adapters are scaled by ``alpha / rank``, whatever they are."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        super()._install_adapter(factors, version)
        lora = self.config.model.lora
        assert lora is not None
        layers: list[Any] = [layer for layer in self._model.modules() if hasattr(layer, "lora_A")]
        for layer in layers:
            layer.scaling["default"] = lora.alpha / lora.rank


class KeepsTheFirstAdapter(ReferenceRolloutBackend):
    """A second adapter gets the name of the first, which is there already."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        if not self._served_version:
            super()._install_adapter(factors, version)
        self._served_version = version


class LeavesKeysAlone(ReferenceRolloutBackend):
    """Factors of a projection that is fused with others are left out."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        retained = {name: value * (".k_proj." not in name) for name, value in factors.items()}
        super()._install_adapter(retained, version)


class LabelsBeforeItInstalls(ReferenceRolloutBackend):
    """The version changes when the adapter is on its way."""

    def _receive_adapter(self, meta: WeightUpdateMeta) -> None:
        self._served_version = meta.version
        super()._receive_adapter(meta)


class TakesAnyBase(ReferenceRolloutBackend):
    """The base of an adapter is never checked."""

    def _base_digest(self) -> str:
        return "0" * 32


SENT, RECEIVED = "I12.lora", "I12.receive-lora"
MUTANTS = (
    Mutant(
        engine=LeavesOutAFactor, killed_by=SENT, issue="a factor that is not sent (I12)", says="after step 1"
    ),
    Mutant(engine=SendsTheAdapterBefore, killed_by=SENT, issue="verl #7014", says="after step 2"),
    Mutant(
        engine=SendsTheBaseToo, killed_by=SENT, issue="base weights that travel along (I12)", says="step 1"
    ),
    Mutant(
        engine=SaysAnotherScale,
        killed_by=SENT,
        issue="servers that read alpha and rank alone (I12)",
        says="the sender says .*rslora=False",
    ),
    Mutant(
        engine=SendsTheAdapterBeforeToo,
        killed_by="I12.sync-lora",
        issue="verl #7014",
        says="drawn after sync 2",
        partner=ROLLOUT_SPEC,
    ),
    Mutant(
        engine=FoldsTheScaleIn,
        killed_by="I12.sync-lora",
        issue="a scale that is applied on both sides (I12)",
        says="drawn after sync 1",
        partner=ROLLOUT_SPEC,
    ),
    Mutant(
        engine=DropsRslora,
        killed_by=RECEIVED,
        issue="SGLang scales by alpha / rank whatever use_rslora says",
        says="update to version 1",
    ),
    Mutant(
        engine=KeepsTheFirstAdapter,
        killed_by=RECEIVED,
        issue="an adapter that is served under the name of the next (I12)",
        says="update to version 5",
    ),
    Mutant(
        engine=LeavesKeysAlone,
        killed_by=RECEIVED,
        issue="SGLang leaves out keys that are adapted without queries",
        says="update to version 1",
    ),
    Mutant(
        engine=LabelsBeforeItInstalls,
        killed_by=RECEIVED,
        issue="slime #327",
        says="around the update to version 1",
    ),
    Mutant(
        engine=TakesAnyBase,
        killed_by="I12.broken-lora",
        issue="factors have the same shapes over any base (I12)",
        says="over another base did not raise",
    ),
)
