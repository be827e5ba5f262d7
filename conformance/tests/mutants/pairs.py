"""What only shows beside another engine, or over several steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.reference import SPEC as REFERENCE
from core_rl.reference.train import ReferenceBackend
from mutants.zoo import Mutant


class EntropyInBits(ReferenceBackend):
    """The entropy comes in another unit than the contract's."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {name: v / math.log(2) if name == "entropy" else v for name, v in outputs.items()}


class NormAfterClipping(ReferenceBackend):
    """The norm that is reported is that of the gradients after clipping."""

    def optimizer_step(self) -> dict[str, float]:
        report = super().optimizer_step()
        assert self.context.config.optimizer is not None
        largest = self.context.config.optimizer.max_grad_norm or math.inf
        return {**report, "grad_norm": min(report["grad_norm"], largest)}


class GradientsThreeTimesTheOthers(ReferenceBackend):
    """Every backward pass is scaled once more than the core has asked for."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                (3.0 * loss).backward()


class ScheduleAdvancedTwice(ReferenceBackend):
    """Each step of the schedule is two."""

    def lr_scheduler_step(self) -> float:
        super().lr_scheduler_step()
        return super().lr_scheduler_step()


class LossScaleOfTheSecondStep(ReferenceBackend):
    """From the second update on, the loss is scaled by what the first one was divided by."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        scale = 0.5 if self.progress.updates else 1.0
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                (scale * loss).backward()


class FirstMomentForgotten(ReferenceBackend):
    """Every other step begins without the momentum of the step before."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None
        if self.progress.updates % 2:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        super().step(scale, lr, count)


class SecondMomentsDroppedOnLoad(ReferenceBackend):
    """A load fills the weights and the first moments only."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        if kind != "exp_avg_sq":
            super().import_tensors(kind, source)


class StepCountOfTheOtherEngine(ReferenceBackend):
    """After a load of a training that has gone on elsewhere, the bias correction begins again."""

    def _set_update_count(self, count: int) -> None:
        super()._set_update_count(min(count, 1))


class RoundsWhatItSaves(ReferenceBackend):
    """A portable checkpoint holds the weights of the compute dtype, not the float32 ones beside them."""

    _saving = False

    def save(self, meta: SaveLoadMeta) -> None:
        self._saving = meta.format == "portable"
        super().save(meta)
        self._saving = False

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            rounded = self._saving and kind == "master" and value is not None
            yield name, value.to(torch.bfloat16).float() if rounded and value is not None else value


class WrapsTheNamesOfMasters(ReferenceBackend):
    """Float32 weights are exported under the names of a wrapper; they load where the same wrapper is."""

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        return {_wrapped(name, kind): shape for name, shape in super()._tensor_shapes(kind).items()}

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            yield _wrapped(name, kind), value


def _wrapped(name: str, kind: TensorKind) -> str:
    return f"module.{name}" if kind == "master" else name


MUTANTS = (
    Mutant(
        engine=EntropyInBits,
        killed_by="I7.pair-logprobs",
        issue="units",
        says=r"'entropy-in-bits' is off the oracle: entropy by [\s\S]*mend 'entropy-in-bits'",
        partner=REFERENCE,
    ),
    Mutant(
        engine=NormAfterClipping,
        killed_by="I1.pair-gradients",
        issue="torchtitan #649",
        says=r"the norm before clipping[\s\S]*mend 'norm-after-clipping'",
        partner=REFERENCE,
    ),
    Mutant(
        engine=GradientsThreeTimesTheOthers,
        killed_by="I1.pair-gradients",
        issue="verl #4710",
        says="mend 'gradients-three-times-the-others'[\\s\\S]*multiplied by 3",
        partner=REFERENCE,
    ),
    Mutant(
        engine=ScheduleAdvancedTwice,
        killed_by="I1.pair-training",
        issue="slime #1152",
        says="is off the oracle: the (loss|norm) of step 2",
        partner=REFERENCE,
    ),
    Mutant(
        engine=LossScaleOfTheSecondStep,
        killed_by="I1.pair-training",
        issue="AReaL #1273",
        says="is off the oracle: the norm of step 1",
        partner=REFERENCE,
    ),
    Mutant(
        engine=FirstMomentForgotten,
        killed_by="I1.pair-training",
        issue="moments between steps",
        says="is off the oracle: the (loss|norm) of step 2",
        partner=REFERENCE,
    ),
    Mutant(
        engine=SecondMomentsDroppedOnLoad,
        killed_by="I11.pair-portable",
        issue="AReaL #1468",
        says="exp_avg_sq moved from 'reference'",
        partner=REFERENCE,
    ),
    Mutant(
        engine=StepCountOfTheOtherEngine,
        killed_by="I11.pair-portable",
        issue="NeMo-RL #3171",
        says="weights two steps after it was moved",
        partner=REFERENCE,
    ),
    Mutant(
        engine=RoundsWhatItSaves,
        killed_by="I11.pair-portable",
        issue="NeMo-RL #2372",
        says="master in the portable checkpoint",
        partner=REFERENCE,
    ),
    Mutant(
        engine=WrapsTheNamesOfMasters,
        killed_by="I11.pair-portable",
        issue="names of wrappers",
        says=r"module\.",
        partner=REFERENCE,
    ),
)
