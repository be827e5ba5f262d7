"""Inference engines that lose weights, or their version, at one moment of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.toolkit.lora import enable_adapter
from core_rl.weight_sync.delta import BASE, DIGEST
from mutants.zoo import Mutant


@Mutant("I14.updates-in-a-row", "slime #327", "not read with the draw")
class ReadsTheVersionLate(ReferenceRolloutBackend):
    """The version is that of the moment at which the answer is handed out."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        response = await super().agenerate(request)
        assert self._worker is not None
        # An update that came while the answer was drawn is installed before.
        await asyncio.wrap_future(self._worker.submit(len, ()))
        return replace(response, versions=(self._served_version,) * len(response.versions))


@Mutant("I14.updates-in-a-row", "verl #7014", "not read with the draw")
class DropsTheSecondUpdate(ReferenceRolloutBackend):
    """The second of several updates in a row counts, and is not installed."""

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if version == 2:
            self._served_version = version
        else:
            super()._install_tensors(tensors, version)


class WakesWithTheWeightsBefore(ReferenceRolloutBackend):
    """Weights are restored from a copy that was made when the memory was released."""

    def release_memory(self) -> None:
        self._copies = {name: value.clone() for name, value in self._model.state_dict().items()}
        super().release_memory()

    def resume_memory(self) -> None:
        super().resume_memory()
        self._model.load_state_dict(self._copies)


@Mutant("I12.updates", "vllm #44371", "method: (tensor|distributed).*state: asleep")
class WakesWithTheTensorsBefore(WakesWithTheWeightsBefore):
    """The same, where updates from disk are right: they bring another model."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        super()._install_from_disk(meta)
        self._copies = {name: value.clone() for name, value in self._model.state_dict().items()}


@Mutant("I12.adapter-updates", "vllm #44371", "state: asleep")
class WakesWithTheAdapterBefore(WakesWithTheWeightsBefore):
    """The same for adapters."""


@Mutant("I12.updates", "vllm #16564: buffers, which level 2 of sleep drops", "with buffers.*state: asleep")
class WakesWithBuffersBefore(ReferenceRolloutBackend):
    """Buffers come back from a copy that was made when the memory was released."""

    def release_memory(self) -> None:
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        super().release_memory()

    def resume_memory(self) -> None:
        super().resume_memory()
        for name, value in self._model.named_buffers():
            value.copy_(self._buffers[name])


@Mutant("I15.sleep", "a random state that waking resets", "without seeds draw the same tokens as the first")
class WakesWithTheFirstSeeds(ReferenceRolloutBackend):
    """Draws without seeds begin again."""

    def resume_memory(self) -> None:
        super().resume_memory()
        self._unseeded = 0


# ----------------------------------------------------------- values that repeat


class Remembers(ReferenceRolloutBackend):
    """Answers to greedy requests are kept by a key."""

    def _key(self, request: LLMRequest) -> object:
        raise NotImplementedError

    def _asks_again(self, request: LLMRequest) -> bool:
        return request.sampling.greedy

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        answered: dict[object, LLMResponse] = self.__dict__.setdefault("_answered", {})
        key = (request.input_ids, request.sampling, self._key(request))
        if not self._asks_again(request):
            return await super().agenerate(request)
        if key not in answered:
            answered[key] = await super().agenerate(request)
        versions = (self._served_version,) * len(answered[key].versions)
        return replace(answered[key], rid=request.rid, versions=versions)


@Mutant("I12.updates", "a rollback that serves what its label had before (I12)", "version: (same|earlier)")
class RemembersByVersion(Remembers):
    """The key is the version's label."""

    def _key(self, request: LLMRequest) -> object:
        return self._served_version


@Mutant("I12.updates", "vllm #9744", "weights before the update|whose version tokens carry")
class RemembersPrompts(Remembers):
    """The key is the prompt alone."""

    def _key(self, request: LLMRequest) -> object:
        return None


@Mutant("I12.updates", "vllm #9744: draws that a seed repeats (I12)", "after update|tokens carry")
class RemembersSeeds(RemembersPrompts):
    """Answers are kept by the prompt and the seed, where there is one."""

    def _asks_again(self, request: LLMRequest) -> bool:
        return request.sampling.seed is not None


@Mutant("I12.adapter-updates", "an adapter's name that another one had (I12)", "(same|earlier)|tokens carry")
class RemembersByNameOfTheAdapter(RemembersByVersion):
    """Answers are kept by the name of the adapter, which has its version."""


@Mutant("I12.adapter-updates", "a name that is loaded already (I12)", "version: (same|earlier)")
class KeepsAdaptersByName(ReferenceRolloutBackend):
    """An adapter under a name that is there is not loaded again."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        named: dict[int, Mapping[str, Tensor]] = self.__dict__.setdefault("_named", {})
        super()._install_adapter(named.setdefault(version, factors), version)


@Mutant("I12.adapter-updates", "a digest of the first factor (I12)", "adapter: other factors B")
class KeepsAdaptersByFactorsA(ReferenceRolloutBackend):
    """An adapter with the factors A of the one before is not loaded again."""

    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        first = {name: value for name, value in factors.items() if "lora_A" in name}
        before = self.__dict__.get("_first", {})
        if any(not torch.equal(value, before.get(name, value + 1)) for name, value in first.items()):
            super()._install_adapter(factors, version)
        self._first, self._served_version = first, version


@Mutant("I12.updates", "changes without a tensor (I12)", "the engine has the version|the weights had")
class DropsEmptyChanges(ReferenceRolloutBackend):
    """An update without a changed tensor is left out, and its version with it."""

    def _install_changes(self, items: Iterable[tuple[str, Tensor]], meta: WeightUpdateMeta) -> None:
        sent = dict(items)
        if BASE in sent and sent.keys() <= {BASE, DIGEST}:
            self._received.commit(self._received.decode(sent.items()), meta.version)
        else:
            super()._install_changes(sent.items(), meta)


@Mutant("I12.updates", "an update to the version that it has (I12)", "version: (same|earlier)")
class SkipsTheSameVersion(ReferenceRolloutBackend):
    """An update to the present version is taken as arrived already."""

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if version != self._served_version:
            super()._install_tensors(tensors, version)

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        if meta.version != self._served_version:
            super()._install_from_disk(meta)


class Asleep(ReferenceRolloutBackend):
    """An engine that knows whether its memory is released."""

    _asleep = False

    def release_memory(self) -> None:
        self._asleep = True
        super().release_memory()

    def resume_memory(self) -> None:
        self._asleep = False
        super().resume_memory()


@Mutant("I12.updates", "changes that arrive asleep (I15)", "form: changes, state: asleep")
class LosesChangesAsleep(Asleep):
    """Changes that arrive while the memory is released are kept as the base, and not installed."""

    def _install_changes(self, items: Iterable[tuple[str, Tensor]], meta: WeightUpdateMeta) -> None:
        if not self._asleep:
            super()._install_changes(items, meta)
            return
        self._received.commit(self._received.decode(items), meta.version)
        self.set_version(meta.version)


@Mutant("I12.updates", "verl #6334: a tied head after changes (I12)", "form: changes", family="qwen3")
class KeepsTheHeadOfChanges(ReferenceRolloutBackend):
    """Changes of the embedding do not reach the head that shares it."""

    def _install_changes(self, items: Iterable[tuple[str, Tensor]], meta: WeightUpdateMeta) -> None:
        head = self._model.get_output_embeddings().weight.detach().clone()
        super()._install_changes(items, meta)
        self._model.get_output_embeddings().weight = torch.nn.Parameter(head)


@Mutant("I12.updates", "scores of the reference before (I12)", "scores after update")
class ScoresByTheWeightsBefore(ReferenceRolloutBackend):
    """Scores of a batch that was scored under the same label are kept."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        scores: dict[object, Tensor] = self.__dict__.setdefault("_scores", {})
        key = (tuple(batch.lengths), temperature)
        return scores.setdefault(key, super().score(batch, temperature))


@Mutant("I12.adapter-updates", "scores of a base (I12)", "scores after update(.|\n)*adapter is not applied")
class ScoresWithoutTheAdapter(ReferenceRolloutBackend):
    """Answers are drawn with the adapter, and given tokens are scored without it."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        enable_adapter(self._model, False)
        try:
            return super().score(batch, temperature)
        finally:
            enable_adapter(self._model, True)


@Mutant(
    "I12.receive-disk", "scores of the reference before (I12)", "top log-probs after the update to version 1"
)
class TopByTheFirstWeights(ReferenceRolloutBackend):
    """The most likely tokens come from the first weights for ever."""

    def _adopt(self, model: PreTrainedModel) -> None:
        super()._adopt(model)
        self._first = getattr(self, "_first", model)

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        model, self._model = self._model, self._first
        try:
            return super().top_logprobs(batch, k, temperature)
        finally:
            self._model = model


@Mutant("I12.updates", "vllm #44371: an update while requests wait (I14)", "state: in flight")
class DropsUpdatesWithRequests(ReferenceRolloutBackend):
    """An update by tensor or process group counts, and is not installed, while a request is in flight."""

    _running = 0

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self._running += 1
        try:
            return await super().agenerate(request)
        finally:
            self._running -= 1

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._dropping = self._running > 0
        super().update_weights(meta)

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if self._dropping:
            self._served_version = version
        else:
            super()._install_tensors(tensors, version)
