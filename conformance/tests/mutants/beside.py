"""Engines with process-wide state that belongs to a single engine."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from core_rl.backend.meta import StatePart
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnOffload
from mutants.zoo import DP2, Mutant


@Mutant(
    "contract.beside",
    "colocated roles with host copies by name",
    "step 1 of the first of two engines in the same processes reports",
)
class OneHostBuffer(OwnOffload):
    """Host copies lie in buffers of the process, by name: the engine that comes second overwrites the first's."""

    _buffers: dict[str, Tensor] = {}  # noqa: RUF012  that is the bug

    def offload(self, part: StatePart) -> None:
        if part == "model":
            self._buffers.update({name: p.detach().clone() for name, p in self.model.named_parameters()})
        super().offload(part)

    def onload(self, part: StatePart) -> None:
        super().onload(part)
        if part == "model":
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(self._buffers[name])


@Mutant("contract.beside", "an engine that thinks the process is its own", "process group", layout=DP2)
class EndsTheProcessGroup(ReferenceBackend):
    """A teardown destroys the process group, which is another engine's as well."""

    def teardown(self) -> None:
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
