"""State that suffers when it is moved to the host and back."""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta, StatePart, TensorKind
from core_rl.backend.tensors import NamedTensors
from core_rl.engine.components import Persistence
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnOffload, inside
from mutants.zoo import Mutant


@Mutant(
    "contract.offloaded-state",
    "slime #1888",
    "named_tensors gives master, exp_avg, exp_avg_sq while the engine is offloaded",
)
@inside(ReferenceBackend, "persistence")
class ExportsFreedMemory(Persistence):
    """``named_tensors`` gives zeros for offloaded tensors."""

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if not self.modes.offloaded:
            return super().named_tensors(kind)
        shapes = self.runtime.tensors.shapes(kind)
        return iter([(name, torch.zeros(shape)) for name, shape in shapes.items()])


@Mutant("I11.offload", "gradients between two passes", "step 1 with offload.. in between reports grad_norm")
class GradientsStayBehind(OwnOffload):
    """Gradients that wait for a step are dropped when weights are offloaded."""

    def offload(self, part: StatePart) -> None:
        if part == "model":
            self.zero_grad()
        super().offload(part)


@Mutant("I11.offload", "AReaL #1468", "in between")
class MomentsBeginAgain(OwnOffload):
    """Offloading the optimizer state drops it."""

    def offload(self, part: StatePart) -> None:
        if part == "optimizer" and self.optimizer is not None:
            for moments in self.optimizer.state.values():
                moments["exp_avg"].zero_()
        super().offload(part)


@Mutant("I11.offload", "NeMo-RL #2372", "step 2 with offload.. in between reports")
class OldCopiesComeBack(OwnOffload):
    """The copies of the first time are kept, and come back each time."""

    _first: dict[str, Tensor] | None = None

    def offload(self, part: StatePart) -> None:
        if self._first is None and part == "model":
            self._first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        super().offload(part)

    def onload(self, part: StatePart) -> None:
        super().onload(part)
        if part == "model" and self._first is not None:
            with torch.no_grad():
                for name, value in self._first.items():
                    self.model.get_parameter(name).copy_(value)


@Mutant(
    "I11.resume-value-head",
    "NeMo-RL #2372, for a head",
    r"master after offload\(\) and onload\(\)[\s\S]*score.weight",
)
class HeadIsNotMoved(OldCopiesComeBack):
    """The same of a value head alone, which the language model does not have."""

    def offload(self, part: StatePart) -> None:
        super().offload(part)
        self._first = {n: v for n, v in (self._first or {}).items() if n.startswith("score.")}


@Mutant("I11.offload-checkpoint", "NeMo-RL #2372", "master loaded into an offloaded engine")
@inside(ReferenceBackend, "persistence")
class LoadIsUndone(Persistence):
    """Weights loaded while offloaded go to the device; the copies on the host are still the old ones."""

    def load(self, meta: SaveLoadMeta) -> None:
        was_offloaded = self.modes.offloaded
        with self.modes.onloaded(*was_offloaded):
            masters = [part.tensor for part in self.runtime.backend.state().local("master")]
            old = [tensor.clone() for tensor in masters]
            super().load(meta)
            for tensor, value in zip(masters, old, strict=True) if was_offloaded else ():
                tensor.copy_(value)


@Mutant("I11.offload-checkpoint", "slime #1888", "master loaded into an offloaded engine")
@inside(ReferenceBackend, "persistence")
class SavesFreedMemory(Persistence):
    """A save while offloaded writes what happens to be there."""

    def save(self, meta: SaveLoadMeta) -> None:
        was_offloaded = self.modes.offloaded
        with self.modes.onloaded(*was_offloaded):
            first = next(iter(self.runtime.backend.state().local("master"))).tensor
            saved = first.clone()
            if was_offloaded:
                first.zero_()
            super().save(meta)
            first.copy_(saved)
