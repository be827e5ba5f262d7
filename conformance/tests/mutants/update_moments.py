"""Inference engines that lose weights, or their version, at one moment of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.reference.rollout import ReferenceRolloutBackend
from mutants.zoo import Mutant

TURNS = 1000
"""Of the event loop, in which an update may come."""


@Mutant("I14.updates-in-a-row", "slime #327", "not read with the draw")
class ReadsTheVersionLate(ReferenceRolloutBackend):
    """The version is that of the moment at which the answer is handed out."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        response = await super().agenerate(request)
        for _ in range(TURNS):
            await asyncio.sleep(0)
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


@Mutant("I15.update-asleep", "vllm #44371", "by tensor, while asleep")
class WakesWithTheTensorsBefore(WakesWithTheWeightsBefore):
    """The same, where updates from disk are right: they bring another model."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        super()._install_from_disk(meta)
        self._copies = {name: value.clone() for name, value in self._model.state_dict().items()}


@Mutant("I15.adapter-asleep", "vllm #44371", "the adapter before")
class WakesWithTheAdapterBefore(WakesWithTheWeightsBefore):
    """The same for adapters."""
