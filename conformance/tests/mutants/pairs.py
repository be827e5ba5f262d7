"""Bugs that only a comparison with another engine, or several steps, can show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import MappedSource, NamedTensors, TensorSource
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.engine.components import Persistence, TrainComponents
from core_rl.engine.guards import require_optimizer
from core_rl.engine.step import TrainStep
from core_rl.reference import SPEC as REFERENCE
from core_rl.reference.train import ReferenceBackend
from core_rl.state.slices import Shard
from core_rl.state.store import TensorStore
from mutants.bases import CountsItself, OwnExport, inside
from mutants.zoo import Mutant


@Mutant(
    "I7.pair-logprobs",
    "units",
    r"'entropy-in-bits' is off the oracle: entropy by [\s\S]*fix 'entropy-in-bits'",
    partner=REFERENCE,
)
class EntropyInBits(ReferenceBackend):
    """The entropy comes in another unit than the contract's."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {name: v / math.log(2) if name == "entropy" else v for name, v in outputs.items()}


class _ReportsTheClippedNorm(TrainStep):
    """Reports no norm above ``max_grad_norm``."""

    def optimizer_step(self) -> dict[str, float]:
        report = super().optimizer_step()
        largest = require_optimizer(self.runtime.config).max_grad_norm or math.inf
        return {**report, "grad_norm": min(report["grad_norm"], largest)}


@Mutant(
    "I1.pair-gradients",
    "torchtitan #649",
    r"the norm before clipping[\s\S]*fix 'norm-after-clipping'",
    partner=REFERENCE,
)
class NormAfterClipping(ReferenceBackend):
    """The norm that is reported is that of the gradients after clipping."""

    components = TrainComponents(step=_ReportsTheClippedNorm)


@Mutant(
    "I1.pair-gradients",
    "verl #4710",
    r"fix 'gradients-three-times-the-others'[\s\S]*multiplied by 3",
    partner=REFERENCE,
)
class GradientsThreeTimesTheOthers(ReferenceBackend):
    """Every backward pass is scaled once more than the core has asked for."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                (3.0 * loss).backward()


@Mutant("I1.pair-training", "slime #1152", "is off the oracle: the (loss|norm) of step 2", partner=REFERENCE)
@inside(ReferenceBackend, "step")
class ScheduleAdvancedTwice(TrainStep):
    """Each step of the schedule is two."""

    def lr_scheduler_step(self) -> float:
        super().lr_scheduler_step()
        return super().lr_scheduler_step()


@Mutant("I1.pair-training", "AReaL #1273", "is off the oracle: the norm of step 1", partner=REFERENCE)
class LossScaleOfTheSecondStep(ReferenceBackend):
    """The loss is scaled by the first denominator from the second update on."""

    _stepped = False

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        scale = 0.5 if self._stepped else 1.0
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                (scale * loss).backward()

    def step(self, scale: float, lr: float, count: int) -> None:
        self._stepped = True
        super().step(scale, lr, count)


@Mutant(
    "I1.pair-training",
    "moments between steps",
    "is off the oracle: the (loss|norm) of step 2",
    partner=REFERENCE,
)
class FirstMomentForgotten(ReferenceBackend):
    """Every other step begins without the momentum of the step before."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None
        if count % 2 == 0:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        super().step(scale, lr, count)


@Mutant("I11.pair-portable", "AReaL #1468", "exp_avg_sq moved from 'reference'", partner=REFERENCE)
class SecondMomentsDroppedOnLoad(OwnExport):
    """A load fills the weights and the first moments only."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        if kind != "exp_avg_sq":
            super().import_tensors(kind, source)


@Mutant("I11.pair-portable", "NeMo-RL #3171", "weights two steps after it was moved", partner=REFERENCE)
class StepCountOfTheOtherEngine(CountsItself):
    """After a load of a run that has continued elsewhere, the bias correction begins again."""

    def restored(self, count: int) -> int:
        return min(count, 1)


class _Rounds(TensorStore):
    """Rounds weights in float32 while a checkpoint is saved."""

    saving = False

    def shards(self, kinds: Sequence[str]) -> Iterator[Shard]:
        for shard in super().shards(kinds):
            rounded = self.saving and shard.name.startswith("master/")
            yield replace(shard, tensor=shard.tensor.bfloat16().float()) if rounded else shard


class _SavesRounded(Persistence):
    """Tells the store when a portable checkpoint is saved."""

    def save(self, meta: SaveLoadMeta) -> None:
        tensors = self.runtime.tensors
        assert isinstance(tensors, _Rounds)
        tensors.saving = meta.format == "portable"
        super().save(meta)
        tensors.saving = False


@Mutant("I11.pair-portable", "NeMo-RL #2372", "master in the portable checkpoint", partner=REFERENCE)
class RoundsWhatItSaves(ReferenceBackend):
    """A portable checkpoint has the weights of the compute dtype, not the float32 masters."""

    components = TrainComponents(tensors=_Rounds, persistence=_SavesRounded)


class _Wraps(TensorStore):
    """Names weights in float32 as in a wrapper."""

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {_wrapped(name, kind): shape for name, shape in super().shapes(kind).items()}

    def stream(self, kind: str) -> NamedTensors:
        for name, value in super().stream(kind):
            yield _wrapped(name, kind), value

    def shards(self, kinds: Sequence[str]) -> Iterator[Shard]:
        for shard in super().shards(kinds):
            kind, _, name = shard.name.partition("/")
            yield replace(shard, name=f"{kind}/{_wrapped(name, kind)}")

    def load(self, kind: str, source: TensorSource) -> None:
        if kind == "master":
            kind, source = "params", MappedSource(source, {n: f"module.{n}" for n in self.shapes("params")})
        super().load(kind, source)


def _wrapped(name: str, kind: str) -> str:
    return f"module.{name}" if kind == "master" else name


@Mutant("I11.pair-portable", "names of wrappers", r"module\.", partner=REFERENCE)
class WrapsTheNamesOfMasters(ReferenceBackend):
    """Float32 weights are exported under the names of a wrapper; they load where the same wrapper is."""

    components = TrainComponents(tensors=_Wraps)
