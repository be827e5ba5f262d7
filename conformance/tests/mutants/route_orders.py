"""Inference engines that are right after each call alone, and wrong after some orders of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from transformers import PreTrainedModel

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import CoreRLError
from core_rl.reference.rollout import ReferenceRolloutBackend
from mutants.zoo import C, Mutant

BLOCK = 32
"""Tokens of a cached prefix."""


@Mutant(
    "I13.route-orders",
    "an update while paused that a resume undoes (I13)",
    "(?s)of greedy tokens after these calls.*pause",
    declared=frozenset({C.PAUSE}),
)
class ResumesWithThePausedWeights(ReferenceRolloutBackend):
    """A pause keeps the weights, and resuming restores them over an update."""

    def pause(self) -> None:
        self._paused_model = self._model

    def resume(self) -> None:
        self._on_worker(setattr, self, "_model", self._paused_model)


@Mutant(
    "I13.route-orders",
    "AReaL #941: a version that is stuck",
    r"versions \[\d+\]; the weights had|tokens carry the versions",
    declared=frozenset({C.PAUSE}),
)
class ResumesWithThePausedVersion(ReferenceRolloutBackend):
    """The same of the version."""

    def pause(self) -> None:
        self._paused_version = self._served_version

    def resume(self) -> None:
        self._on_worker(setattr, self, "_served_version", self._paused_version)


@Mutant(
    "I13.route-orders",
    "an update that follows a failed one (I12)",
    "(?s)of greedy tokens after these calls.*fail_update",
)
class SkipsTheUpdateAfterAFailure(ReferenceRolloutBackend):
    """The first update after a failed one is acknowledged, and changes nothing but the version."""

    _failed = False

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if self._failed:
            self._failed = False
            self.set_version(meta.version)
            return
        try:
            super().update_weights(meta)
        except CoreRLError:
            self._failed = True
            raise


@Mutant(
    "I13.route-orders",
    "a wake that restores a copy from before the update (I15)",
    "(?s)of greedy tokens after these calls.*(sleep_or_wake|change_before_sleep)",
)
class WakesWithTheUpdateBefore(ReferenceRolloutBackend):
    """A sleep keeps the weights from before the last update, and a wake restores them."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before = self._model
        super().update_weights(meta)
        self._before = before

    def resume_memory(self) -> None:
        super().resume_memory()
        self._on_worker(setattr, self, "_model", getattr(self, "_before", self._model))


@Mutant(
    "I13.route-orders",
    "an update that waits for aborted requests, and is dropped (I13)",
    "(?s)of greedy tokens.*weights before the update.*change_after_abort",
)
class LosesTheUpdateAfterAnAbort(ReferenceRolloutBackend):
    """The first update after an abort is acknowledged, and changes nothing but the version."""

    _aborted = False

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        try:
            return await super().agenerate(request)
        except asyncio.CancelledError:
            self._aborted = True
            raise

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before = self._model
        super().update_weights(meta)
        if self._aborted:
            self._on_worker(setattr, self, "_model", before)
        self._aborted = False


@Mutant(
    "I13.route-orders",
    "blocks that requests still need stay in the prefix cache (vllm #9744)",
    "(?s)after a shared prefix.*change_between_prefixes",
    declared=frozenset({C.PAUSE}),
)
class KeepsSharedPrefixesInAPause(ReferenceRolloutBackend):
    """An update in a pause leaves cached prefixes that several prompts share: requests that wait may need them."""

    _paused = False

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        super().update_weights(meta)
        if not self._paused:
            self._cached().clear()

    def _cached(self) -> dict[tuple[int, ...], tuple[PreTrainedModel, set[tuple[int, ...]]]]:
        """The weights and the prompts of each prefix."""
        cached: dict[tuple[int, ...], tuple[PreTrainedModel, set[tuple[int, ...]]]]
        cached = self.__dict__.setdefault("_prefixes", {})
        return cached

    def _complete(self, entries: Sequence[tuple[LLMRequest, Future[LLMResponse]]]) -> None:
        current = self._model
        for request, future in entries:
            model, prompts = self._cached().setdefault(request.input_ids[:BLOCK], (current, set()))
            prompts.add(request.input_ids)
            self._model = model if len(prompts) > 1 else current
            super()._complete([(request, future)])
        self._model = current


@Mutant(
    "I13.adapter-orders",
    "an adapter that arrives while paused, and that a resume undoes (I13)",
    "(?s)of greedy tokens.*(change_while_paused|pause_or_resume|while_paused=True)",
    declared=frozenset({C.PAUSE}),
)
class ResumesWithThePausedAdapter(ReferenceRolloutBackend):
    """A pause keeps the adapter, and resuming restores it over an update."""

    def pause(self) -> None:
        state = self._model.state_dict()
        self._paused_factors = {name: value.clone() for name, value in state.items() if ".lora_" in name}

    def resume(self) -> None:
        self._on_worker(self._model.load_state_dict, self._paused_factors, False)
