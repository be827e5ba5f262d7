"""Inference engines that lose weights, versions or requests."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference_guards import InferenceComponents, RequestGate
from core_rl.errors import CoreRLError, WeightsError
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Completion
from core_rl.registry.spec import EngineSpec
from mutants.zoo import C, Mutant

Entries = Sequence[tuple[LLMRequest, Future[LLMResponse]]]


# ----------------------------------------------------------- weights that arrive


class Partial(ReferenceRolloutBackend):
    """Only some of the new weights are taken."""

    def _takes(self, name: str, value: Tensor) -> bool:
        raise NotImplementedError

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        old = {name: value.detach().clone() for name, value in self._model.named_parameters()}
        super()._install_from_disk(meta)
        with torch.no_grad():
            for name, value in self._model.named_parameters():
                if not self._takes(name, value):
                    value.copy_(old[name])


@Mutant("I12.receive-disk", "verl #5801", r"it looks like: vectors \(norms, biases\) have the weights before")
class TakesOnlyMatrices(Partial):
    """Norms and biases are not synced."""

    def _takes(self, name: str, value: Tensor) -> bool:
        return value.dim() > 1


@Mutant("I12.receive-disk", "verl #7014", "weights before the update")
class TakesNothing(Partial):
    """The update is acknowledged, and the weights stay."""

    def _takes(self, name: str, value: Tensor) -> bool:
        return False


@Mutant(
    "I12.receive-disk", "verl #6334", "the body has the new weights, and the tied head those", family="qwen3"
)
class ReloadUntiesTheHead(ReferenceRolloutBackend):
    """After a reload the head keeps the old embedding."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        head = self._model.get_output_embeddings().weight.detach().clone()
        super()._install_from_disk(meta)
        self._model.get_output_embeddings().weight = torch.nn.Parameter(head)


@Mutant("I12.updates", "vllm #9744, NeMo-RL #4018", "weights before the update")
class KeepsPrefixes(ReferenceRolloutBackend):
    """Cached prefixes of prompts are reused after the weights have changed."""

    def _complete(self, entries: Entries) -> None:
        cache = self.__dict__.setdefault("_prefixes", {})
        current = self._model
        for request, future in entries:
            prefix = request.input_ids[:8]
            self._model = cache.setdefault(prefix, current) if len(prefix) == 8 else current
            super()._complete([(request, future)])
        self._model = current


class RemembersOldWeights(ReferenceRolloutBackend):
    """The model from before an update is kept next to the new one."""

    _old: PreTrainedModel | None = None

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        self._old = copy.deepcopy(self._model)
        super()._install_from_disk(meta)

    @torch.inference_mode()
    def _logprobs(self, ids: tuple[int, ...], prefix: int) -> tuple[float, ...]:
        """Log-probs of all tokens but the first, with keys and values of the old weights for ``prefix`` of them."""
        assert self._old is not None
        row = torch.tensor([ids])
        before = self._old(input_ids=row[:, :prefix], use_cache=True)
        rest = self._model(input_ids=row[:, prefix:], past_key_values=before.past_key_values, use_cache=True)
        rows = torch.cat([before.logits[0], rest.logits[0]])[:-1].log_softmax(-1)
        return tuple(rows.gather(-1, row[0, 1:, None])[:, 0].tolist())


@Mutant("I12.updates", "vllm #9744", "it looks like: keys and values of the weights before the update stay")
class KeepsKeysAndValues(RemembersOldWeights):
    """Whole blocks of a prompt keep their keys and values over an update."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        response = super()._response(request, completion)
        size = len(request.input_ids)
        if self._old is None or not (prefix := (size - 1) // 16 * 16):
            return response
        values = self._logprobs(response.input_ids + response.output_ids, prefix)
        return replace(response, logprobs=values[size - 1 :])


@Mutant(
    "I12.receive-disk",
    "a replica that misses an update",
    r"it looks like: \d+ of \d+ answers .* have the log-probs of the weights before",
)
class OneReplicaStaysBehind(RemembersOldWeights):
    """Every second prompt goes to a replica with the old weights."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        response = super()._response(request, completion)
        if self._old is None or sum(request.input_ids) % 2:
            return response
        size = len(request.input_ids)
        values = self._logprobs(response.input_ids + response.output_ids, size + len(completion.ids) - 1)
        return replace(response, logprobs=values[size - 1 :])


@Mutant(
    "I12.receive-disk", "a layer of a pipeline", "it looks like: layer 1 has the weights before the update"
)
class SkipsTheSecondLayer(Partial):
    """A stage without the update."""

    def _takes(self, name: str, value: Tensor) -> bool:
        return ".1." not in name


@Mutant("I14.update-in-flight", "vllm #9744", "it looks like: requests in flight keep keys and values")
class KeepsTheCacheInFlight(RemembersOldWeights):
    """Requests go on over an update with the cache that the old weights have filled."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        before = self._served_version
        response = await super().agenerate(request)
        if self._served_version == before:
            return response
        size, early = len(request.input_ids), len(response.output_ids) // 2
        values = self._logprobs(response.input_ids + response.output_ids, size + early - 1)
        versions = (before,) * early + (self._served_version,) * (len(response.versions) - early)
        return replace(response, logprobs=values[size - 1 :], versions=versions)


@Mutant("I14.update-in-flight", "slime #327, prime-rl #1901", "the label changes before the weights")
class LabelsBeforeWeights(ReferenceRolloutBackend):
    """The version changes when an update begins, and requests in flight carry it."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before, self._served_version = self._served_version, meta.version
        try:
            super().update_weights(meta)
        except CoreRLError:
            self._served_version = before
            raise


@Mutant("I14.update-in-flight", "miles #2372", "were cut short")
class ThrowsAwayWhatIsInFlight(ReferenceRolloutBackend):
    """An update aborts the requests that run."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._updating = True
        super().update_weights(meta)
        self._updating = False

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        response = super()._response(request, completion)
        return replace(response, stop_reason="abort") if getattr(self, "_updating", False) else response


# ----------------------------------------------------------- updates that fail


@Mutant("I12.failed-update", "a label before the weights (I12)", r"versions \[4\]; the weights had 3 to 3")
class LabelsAFailedUpdate(ReferenceRolloutBackend):
    """Tokens carry the new version although the update has failed."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._served_version = meta.version
        super().update_weights(meta)


@Mutant("I12.failed-update", "a failed reload that nobody hears of (I12)", "did not raise")
class SwallowsFailures(ReferenceRolloutBackend):
    """A failed update is logged and forgotten."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        try:
            super().update_weights(meta)
        except CoreRLError:
            self.set_version(meta.version)


@Mutant("I12.failed-update", "a reload that stops half way (I12)", "after an update from a model of another")
class LeavesAMixture(ReferenceRolloutBackend):
    """Weights are copied in turn, until a misfit."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        try:
            super()._install_from_disk(meta)
        except WeightsError:
            self._copy_what_fits(str(meta.path))
            raise

    def _copy_what_fits(self, path: str) -> None:
        try:
            source = dict(self._load(ModelConfig(path=path)).named_parameters())
        except CoreRLError:
            return
        with torch.no_grad():
            for name, value in self._model.named_parameters():
                if value.shape == source[name].shape:
                    value.copy_(source[name])


@Mutant("I12.failed-update", "a sleep that keeps no copy (I12)", "weights before the update")
class LosesItsWeightsAsleep(ReferenceRolloutBackend):
    """After an update that failed while the memory was released, weights come from the first directory."""

    _asleep = _failed = False

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._failed = self._asleep
        super().update_weights(meta)
        self._failed = False

    def release_memory(self) -> None:
        super().release_memory()
        self._asleep = True

    def resume_memory(self) -> None:
        if self._failed:
            self._on_worker(lambda: self._adopt(self._load(self.config.model)))
        self._asleep = self._failed = False
        super().resume_memory()


# ----------------------------------------------------------- versions and requests


@Mutant("contract.rollout-versions", "AReaL #941", r"versions \[0\]")
class VersionStuckAtZero(ReferenceRolloutBackend):
    """Tokens carry version 0 for ever."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        response = super()._response(request, completion)
        return replace(response, versions=(0,) * len(response.versions))


@Mutant("contract.rollout-versions", "miles #2372", "ended with 'abort'")
class LabelAbortsRequests(ReferenceRolloutBackend):
    """A new version label aborts all requests in flight."""

    def set_version(self, version: int) -> None:
        self._labelling = True
        super().set_version(version)
        self._labelling = False

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        response = super()._response(request, completion)
        return replace(response, stop_reason="abort") if getattr(self, "_labelling", False) else response


@Mutant("contract.rollout-cancel", "miles #2372", "answers ended with .*abort")
class CancelAbortsAll(ReferenceRolloutBackend):
    """A cancelled request makes the server abort everything."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        cancelled: list[str] = self.__dict__.setdefault("_cancelled", [])
        before = len(cancelled)
        try:
            response = await super().agenerate(request)
        except asyncio.CancelledError:
            cancelled.append(request.rid)
            raise
        aborted = any(self.aborts(rid, request.rid) for rid in cancelled[before:])
        return replace(response, stop_reason="abort") if aborted else response

    def aborts(self, cancelled: str, rid: str) -> bool:
        """Whether the end of one request is that of another."""
        return True


@Mutant("contract.rollout-cancel", "SGLang's /abort_request (I13)", "answers ended with .*abort")
class CancelAbortsByPrefix(CancelAbortsAll):
    """A server aborts every request whose name begins so."""

    def aborts(self, cancelled: str, rid: str) -> bool:
        return rid.startswith(cancelled)


@Mutant("contract.rollout-rid", "retries that are answered once (I13)", "8 tokens; max_new_tokens = 2")
class RetriesByRid(ReferenceRolloutBackend):
    """An answer is kept by the name of its request."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        answers: dict[str, LLMResponse] = self.__dict__.setdefault("_answers", {})
        if request.rid not in answers:
            answers[request.rid] = await super().agenerate(request)
        return answers[request.rid]


class NeverCloses(RequestGate):
    """A pause lets requests pass."""

    def close(self) -> bool:
        """Nothing."""
        return False


@Mutant("contract.rollout-pause", "tokens of no version (I14)", "were answered while the engine was paused")
class PauseIsForgotten(ReferenceRolloutBackend):
    """Requests are completed while the engine is paused."""

    components = InferenceComponents(gate=NeverCloses)


class NeverAsksForTheRid(RequestGate):
    """Two requests in flight may have one rid."""

    @contextmanager
    def named(self, rid: str) -> Iterator[None]:
        """Nothing."""
        yield


@Mutant(
    "contract.rollout-rid",
    "an abort by rid that ends the request of somebody else (SGLang refuses a rid in use)",
    "were in flight at one time",
)
class SharesRids(ReferenceRolloutBackend):
    """A rid names several requests at one time."""

    components = InferenceComponents(gate=NeverAsksForTheRid)


def never_refuse(spec: EngineSpec, capability: Capability, label: str) -> None:
    """Accept undeclared options."""


@Mutant(
    "contract.rollout-undeclared",
    "an undeclared option that half works",
    "'score' is not declared",
    undeclared=frozenset({C.SCORE}),
)
class ScoresWithoutDeclaring(ReferenceRolloutBackend):
    """``score`` works, although the spec does not list it."""

    components = InferenceComponents(require_capability=never_refuse)
