"""Optimizers that go wrong late, for one head, with frozen parameters, or after an export."""

from __future__ import annotations

from pathlib import Path

import torch

from core_rl.backend.tensors import NamedTensors
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnCheckpoint, OwnExport, TrainContext
from mutants.zoo import Mutant


class RightOnlyAfterAnExport(OwnExport):
    """The optimizer gets half of each gradient from the third step on, unless an export has gathered it."""

    _exported = False

    def export_tensors(self, kind: str) -> NamedTensors:
        self._exported = self._exported or kind == "grads"
        yield from super().export_tensors(kind)

    def step(self, scale: float, lr: float, count: int) -> None:
        halved = count > 2 and not self._exported
        self._exported = False
        super().step(0.5 * scale if halved else scale, lr, count)


class ClipsByTheStepBefore(ReferenceBackend):
    """Gradients are scaled by the previous step's clipping factor; right at first."""

    _scale: float | None = None

    def step(self, scale: float, lr: float, count: int) -> None:
        previous, self._scale = self._scale, scale
        super().step(scale if previous is None else previous, lr, count)


class HeadHasALearningRateOfItsOwn(ReferenceBackend):
    """The scalar head learns ten times as fast."""

    def step(self, scale: float, lr: float, count: int) -> None:
        if self.context.config.model.head == "lm":
            return super().step(scale, lr, count)
        head = self.model.get_parameter("score.weight")
        before = head.detach().clone()
        super().step(scale, lr, count)
        with torch.no_grad():
            head.add_(head - before, alpha=9.0)
        return None


class NoClippingBesideFrozen(ReferenceBackend):
    """Gradients are not scaled where some parameters have none."""

    def step(self, scale: float, lr: float, count: int) -> None:
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        super().step(1.0 if frozen else scale, lr, count)


class EmbeddingIsTrainedAgain(ReferenceBackend):
    """Tying the head turns the gradients of a frozen embedding on."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.model.get_input_embeddings().requires_grad_(True)
        self.adopt(self.model, context)


class BiasCorrectionStops(ReferenceBackend):
    """The count of the bias correction ends at five."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, min(count, 5))


class CountsInOneByte(ReferenceBackend):
    """The step count is kept modulo 256."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, (count - 1) % 256 + 1)


class ExportTakesTheGradients(OwnExport):
    """Gathering parameters frees the gradients."""

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from super().export_tensors(kind)
        if kind == "params":
            self.zero_grad()


class SaveTakesTheGradients(OwnCheckpoint):
    """A save drops the gradients to make room."""

    def save_sharded(self, directory: Path, with_optimizer: bool) -> None:
        self.zero_grad()
        super().save_sharded(directory, with_optimizer)


MUTANTS = (
    Mutant(
        engine=RightOnlyAfterAnExport,
        killed_by="I1.training",
        issue="what an export mends",
        says="the (loss|norm) of step 3",
    ),
    Mutant(
        engine=ClipsByTheStepBefore,
        killed_by="I1.training",
        issue="AReaL #1273",
        says="the (loss|norm) of step [23]|weights after 4 steps",
    ),
    Mutant(
        engine=HeadHasALearningRateOfItsOwn,
        killed_by="I20.adamw-value-head",
        issue="pytorch #149205",
        says="only the head is wrong",
    ),
    Mutant(
        engine=NoClippingBesideFrozen,
        killed_by="I20.frozen",
        issue="frozen parameters",
        says="gradients are not clipped",
    ),
    Mutant(
        engine=EmbeddingIsTrainedAgain,
        killed_by="I20.frozen-parts",
        issue="peft #2018",
        says=r"1 of \d+ parameters frozen[\s\S]*unexpected",
        family="qwen3",
    ),
    Mutant(
        engine=BiasCorrectionStops,
        killed_by="I20.adamw",
        issue="bias correction",
        says="stays at step 5",
    ),
    Mutant(
        engine=CountsInOneByte,
        killed_by="I20.update-count",
        issue="NeMo-RL #3171",
        says="wraps around at 256",
    ),
    Mutant(
        engine=ExportTakesTheGradients,
        killed_by="I5.export-before-step",
        issue="freed by a gather",
        says="after an export of 'params'",
    ),
    Mutant(
        engine=SaveTakesTheGradients,
        killed_by="I5.export-before-step",
        issue="dropped by a save",
        says=r"after save\(\) as 'sharded'",
    ),
)
