"""Optimizers that go wrong late, for one head, with frozen parameters, or after an export."""

from __future__ import annotations

from pathlib import Path

import torch

from core_rl.backend.tensors import NamedTensors
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnCheckpoint, OwnExport, TrainContext
from mutants.zoo import Mutant


@Mutant("I1.training", "what an export mends", "the (loss|norm) of step 3")
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


@Mutant("I1.training", "AReaL #1273", "the (loss|norm) of step [23]|weights after 4 steps")
class ClipsByTheStepBefore(ReferenceBackend):
    """Gradients are scaled by the previous step's clipping factor; right at first."""

    _scale: float | None = None

    def step(self, scale: float, lr: float, count: int) -> None:
        previous, self._scale = self._scale, scale
        super().step(scale if previous is None else previous, lr, count)


@Mutant("I20.adamw-value-head", "pytorch #149205", "only the head is wrong")
class HeadHasALearningRateOfItsOwn(ReferenceBackend):
    """The scalar head learns ten times as fast."""

    def _factor(self, lr: float) -> float:
        return 10.0

    def step(self, scale: float, lr: float, count: int) -> None:
        if self.context.config.model.head == "lm":
            return super().step(scale, lr, count)
        head = self.model.get_parameter("score.weight")
        before = head.detach().clone()
        super().step(scale, lr, count)
        with torch.no_grad():
            head.add_(head - before, alpha=self._factor(lr) - 1)
        return None


@Mutant("I20.adamw-value-head", "NeMo-RL #2530", "learning rate of the config, without its schedule")
class HeadHasNoSchedule(HeadHasALearningRateOfItsOwn):
    """The scalar head has the learning rate of the config in each step."""

    def _factor(self, lr: float) -> float:
        optimizer = self.context.config.optimizer
        assert optimizer is not None
        return optimizer.lr / lr


@Mutant("I20.frozen", "frozen parameters", "gradients are not clipped")
class NoClippingBesideFrozen(ReferenceBackend):
    """Gradients are not scaled where some parameters have none."""

    def step(self, scale: float, lr: float, count: int) -> None:
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        super().step(1.0 if frozen else scale, lr, count)


@Mutant("I20.frozen-parts", "peft #2018", r"1 of \d+ parameters frozen[\s\S]*unexpected", family="qwen3")
class EmbeddingIsTrainedAgain(ReferenceBackend):
    """Tying the head turns the gradients of a frozen embedding on."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.model.get_input_embeddings().requires_grad_(True)
        self.adopt(self.model, context)


@Mutant("I20.adamw", "bias correction", "stays at step 5")
class BiasCorrectionStops(ReferenceBackend):
    """The count of the bias correction ends at five."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, min(count, 5))


@Mutant("I20.adamw", "advantages of 0 (I20)", "it looks like: a step whose gradients are all 0 is left out")
class SkipsStepsWithoutGradients(ReferenceBackend):
    """A step whose gradients are all 0 is left out."""

    def step(self, scale: float, lr: float, count: int) -> None:
        if any(bool(p.grad.any()) for p in self.model.parameters() if p.grad is not None):
            super().step(scale, lr, count)


@Mutant("I20.update-count", "NeMo-RL #3171", "wraps around at 256")
class CountsInOneByte(ReferenceBackend):
    """The step count is kept modulo 256."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, (count - 1) % 256 + 1)


@Mutant("I5.export-before-step", "freed by a gather", "after an export of 'params'")
class ExportTakesTheGradients(OwnExport):
    """Gathering parameters frees the gradients."""

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from super().export_tensors(kind)
        if kind == "params":
            self.zero_grad()


@Mutant("I5.export-before-step", "dropped by a save", r"after save\(\) as 'sharded'")
class SaveTakesTheGradients(OwnCheckpoint):
    """A save drops the gradients to make room."""

    def save_sharded(self, directory: Path, with_optimizer: bool) -> None:
        self.zero_grad()
        super().save_sharded(directory, with_optimizer)
