"""Engines that lose, mix up or mislabel adapters which go from one to the other by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.errors import UnsupportedCapability
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.weight_sync.messages import AdapterMetadata
from mutants.streams import SendsTheStepBefore
from mutants.uploads import Sends, Whole
from mutants.zoo import Mutant


@Mutant("I12.lora", "a factor that is not sent (I12)", "after step 1")
class LeavesOutAFactor(Sends):
    """One factor of the last layer is not sent."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from [(name, tensor.clone()) for name, tensor in tensors][:-1]


@Mutant("I12.lora", "verl #7014", "after step 2")
class SendsTheAdapterBefore(SendsTheStepBefore):
    """The adapter that is sent was gathered at the previous send."""


@Mutant("I12.sync-lora", "verl #7014", "drawn after sync 2", partner=ROLLOUT_SPEC)
class SendsTheAdapterBeforeToo(SendsTheAdapterBefore):
    """The same, for the check of a pair."""


@Mutant("I12.lora", "base weights that travel along (I12)", "step 1")
class SendsTheBaseToo(Sends):
    """Base weights travel along."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        yield from tensors
        yield from ((part.name, part.tensor) for part in self.state().local("params"))


@Mutant(
    "I12.sync-lora", "a scale that is applied on both sides (I12)", "drawn after sync 1", partner=ROLLOUT_SPEC
)
class FoldsTheScaleIn(Sends):
    """The second factor is sent with the scale in it, by which the receiver multiplies again."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        lora = self.context.config.model.lora
        assert lora is not None
        for name, tensor in tensors:
            yield name, tensor * lora.alpha / lora.rank if ".lora_B." in name else tensor


@Mutant("I12.lora", "servers that read alpha and rank alone (I12)", "the sender says .*rslora=False")
class SaysAnotherScale(Sends):
    """An adapter with rsLoRA is announced as one without."""

    def described(self, adapter: AdapterMetadata) -> AdapterMetadata:
        return replace(adapter, rslora=False)


@Mutant("I12.adapter-updates", "SGLang scales by alpha / rank whatever use_rslora says", "update 1")
class DropsRslora(ReferenceRolloutBackend):
    """Adapters are scaled by ``alpha / rank``, whatever they are."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        super()._install_adapter(factors, version)
        lora = self.config.model.lora
        assert lora is not None
        layers: list[Any] = [layer for layer in self._model.modules() if hasattr(layer, "lora_A")]
        for layer in layers:
            layer.scaling["default"] = lora.alpha / lora.rank


@Mutant("I12.adapter-updates", "an adapter that is served under the name of the next (I12)", "after update")
class KeepsTheFirstAdapter(ReferenceRolloutBackend):
    """A second adapter gets the name of the first, which is there already."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        if not self._served_version:
            super()._install_adapter(factors, version)
        self._served_version = version


@Mutant("I12.adapter-updates", "SGLang leaves out keys that are adapted without queries", "update 1")
class LeavesKeysAlone(ReferenceRolloutBackend):
    """Factors of a projection that is fused with others are left out."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        retained = {name: value * (".k_proj." not in name) for name, value in factors.items()}
        super()._install_adapter(retained, version)


@Mutant("I12.adapter-updates", "slime #327", "whose version tokens carry, after update")
class LabelsBeforeItInstalls(ReferenceRolloutBackend):
    """The version changes when the adapter is on its way."""

    def _receive_adapter(self, meta: WeightUpdateMeta) -> None:
        self._served_version = meta.version
        super()._receive_adapter(meta)


@Mutant(
    "I12.broken-lora", "factors have the same shapes over any base (I12)", "over another base did not raise"
)
class TakesAnyBase(ReferenceRolloutBackend):
    """The base of an adapter is never checked."""

    def _base_digest(self) -> str:
        return "0" * 32


class RefusesScoresWithAdapters(ReferenceRolloutBackend):
    """No fault: given tokens are scored without ``model.lora`` alone, as by vLLM on a CPU (vllm #16668)."""

    def _for_each(self, batch: SequenceBatch, temperature: float, read: Any) -> list[Any]:
        if self.config.model.lora is not None:
            raise UnsupportedCapability("model.lora is set: no scores")
        return super()._for_each(batch, temperature, read)
