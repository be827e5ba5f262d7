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


class ReadsTheVersionLate(ReferenceRolloutBackend):
    """The version is that of the moment at which the answer is handed out."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        response = await super().agenerate(request)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return replace(response, versions=(self._served_version,) * len(response.versions))


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


class WakesWithTheTensorsBefore(WakesWithTheWeightsBefore):
    """The same, where updates from disk are right: they bring another model."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        super()._install_from_disk(meta)
        self._copies = {name: value.clone() for name, value in self._model.state_dict().items()}


class WakesWithTheAdapterBefore(WakesWithTheWeightsBefore):
    """The same for adapters."""


IN_A_ROW, ASLEEP = "I14.updates-in-a-row", "I15.update-asleep"
MUTANTS = (
    Mutant(
        engine=ReadsTheVersionLate,
        killed_by=IN_A_ROW,
        issue="slime #327",
        says="not read with the draw",
    ),
    Mutant(
        engine=DropsTheSecondUpdate,
        killed_by=IN_A_ROW,
        issue="verl #7014",
        says="not read with the draw",
    ),
    Mutant(
        engine=WakesWithTheTensorsBefore,
        killed_by=ASLEEP,
        issue="vllm #44371",
        says="by tensor, while asleep",
    ),
    Mutant(
        engine=WakesWithTheAdapterBefore,
        killed_by="I15.adapter-asleep",
        issue="vllm #44371",
        says="the adapter before",
    ),
)
