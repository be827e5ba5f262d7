"""Saving, loading, exporting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.checkpoint.shards import Shard, write_shards
from core_rl.reference.train import ReferenceBackend
from mutants.bases import Replicated, TrainContext
from mutants.zoo import DP2, Mutant


class MomentsDropped(ReferenceBackend):
    """Sharded checkpoints hold weights only, and load without a word."""

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        return (shard for shard in super().shards(with_optimizer) if not shard.name.startswith("exp_avg"))

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        super().load_sharded(directory, with_optimizer=False)


class StepCountStartsAgain(ReferenceBackend):
    """The step count of the bias correction is not restored."""

    def _set_update_count(self, count: int) -> None:
        super()._set_update_count(0)


class RandomStateStartsAgain(ReferenceBackend):
    """Dropout after a resume is another one."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        super().load_sharded(directory, with_optimizer)
        torch.manual_seed(0)


class FrozenWeightsNotSaved(ReferenceBackend):
    """A checkpoint of the trained parameters only."""

    def _load_held(self, kind: TensorKind, source: TensorSource) -> None:
        frozen = {
            name: p.detach().clone() for name, p in self.model.named_parameters() if not p.requires_grad
        }
        super()._load_held(kind, source)
        with torch.no_grad():
            for name, value in frozen.items():
                self.model.get_parameter(name).copy_(value)


class OnlyRankZeroLoads(Replicated):
    """On another number of ranks, only the first one finds its file."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        if self.context.world.rank == 0:
            super().load_sharded(directory, with_optimizer)


class MomentsExportedInHalfPrecision(ReferenceBackend):
    """What leaves the engine as float32 was rounded on the way."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            rounded = kind == "exp_avg" and value is not None
            yield name, value.bfloat16().float() if rounded and value is not None else value


class ScheduleNotSaved(ReferenceBackend):
    """A portable checkpoint begins the schedule again."""

    def save(self, meta: SaveLoadMeta) -> None:
        progress = self.progress
        if meta.format == "portable":
            self.restore_progress(replace(progress, lr_steps=0))
        super().save(meta)
        self.restore_progress(progress)


class MomentsNotLoaded(ReferenceBackend):
    """A portable checkpoint fills the weights; the optimizer begins again."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        if kind not in ("exp_avg", "exp_avg_sq"):
            super().import_tensors(kind, source)


class WritesBothCopies(ReferenceBackend):
    """An export holds the tied matrix under both names."""

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        shapes = super()._tensor_shapes(kind)
        if kind == "params":
            shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
        return shapes

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from super().export_tensors(kind)
        if kind == "params":
            yield "lm_head.weight", self.model.get_output_embeddings().weight.detach().clone()


class HeadUnderAPrivateName(ReferenceBackend):
    """The value head is exported under a name that transformers does not know."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            yield ("v_head.weight" if kind == "params" and name == "score.weight" else name), value


class VectorsNotLoaded(ReferenceBackend):
    """A load leaves the norms as they were."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        vectors = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.dim() < 2}
        super().import_tensors(kind, source)
        if kind == "params":
            with torch.no_grad():
                for name, value in vectors.items():
                    self.model.get_parameter(name).copy_(value)


class UploadsOldWeights(ReferenceBackend):
    """The weights of the first upload are sent again and again."""

    _sent: dict[str, Tensor] | None = None

    def export_tensors(self, kind: str) -> NamedTensors:
        if kind != "params":
            yield from super().export_tensors(kind)
            return
        if self._sent is None:
            self._sent = {
                name: value.clone() for name, value in super().export_tensors(kind) if value is not None
            }
        yield from self._sent.items()


class LoadsAnything(ReferenceBackend):
    """An overridden ``load`` skips the digests."""

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.format != "sharded":
            super().load(meta)
            return
        shards = Path(meta.path) / "shards"
        if any(shards.iterdir()):
            self.load_sharded(shards, with_optimizer=True)


class RanksDrawTheirOwnWeights(Replicated):
    """Each rank draws what no file gives from a seed of its own."""

    def build(self, context: TrainContext) -> None:
        self.context.config = self.context.config.model_copy(
            update={"seed": self.context.config.seed + addr.rank}
        )
        super().build(context)


class NewHeadIsZero(ReferenceBackend):
    """A new head begins at zero, and the trunk never learns."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        with torch.no_grad():
            if self.context.config.model.head == "value":
                self.model.get_parameter("score.weight").zero_()


class SnapshotByReference(ReferenceBackend):
    """What is written in the background is read from the live tensors."""

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            time.sleep(0.5)
            write_shards(
                directory, self.context.world.rank, self._shards(with_optimizer), self.context.world.size
            )

        return write


class WeightsByReference(ReferenceBackend):
    """Moments are copied for the background, and weights are not."""

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        copies = [
            shard if shard.name.startswith("master") else replace(shard, tensor=shard.tensor.clone())
            for shard in self._shards(with_optimizer)
        ]

        def write(directory: Path) -> None:
            time.sleep(0.5)
            write_shards(directory, self.context.world.rank, copies, self.context.world.size)

        return write


MUTANTS = (
    Mutant(
        engine=SnapshotByReference,
        killed_by="I11.asynchronous",
        issue="a snapshot by reference",
        says="'sharded' checkpoint that was saved in the background",
    ),
    Mutant(
        engine=WeightsByReference,
        killed_by="I11.asynchronous",
        issue="a snapshot by reference",
        says="master loaded from a 'sharded' checkpoint that was saved in the background",
    ),
    Mutant(
        engine=RanksDrawTheirOwnWeights,
        killed_by="I3.from-config",
        issue="SkyRL #1725",
        says="drawn from seed",
        layout=DP2,
    ),
    Mutant(engine=NewHeadIsZero, killed_by="I3.new-head", issue="new heads", says="new head is zero"),
    Mutant(
        engine=MomentsDropped,
        killed_by="I11.resume",
        issue="AReaL #1468",
        says="exp_avg after the load",
    ),
    Mutant(
        engine=StepCountStartsAgain,
        killed_by="I11.resume",
        issue="NeMo-RL #3171",
        says="of step 3 is .*the step count of the bias correction",
    ),
    Mutant(
        engine=RandomStateStartsAgain,
        killed_by="I11.resume",
        issue="random state",
        says="'loss' of step 2 is .*: random state of dropout",
    ),
    Mutant(
        engine=FrozenWeightsNotSaved,
        killed_by="I11.resume-frozen",
        issue="frozen parameters",
        says="after resuming",
    ),
    Mutant(engine=OnlyRankZeroLoads, killed_by="I11.other-layout", issue="AReaL #1470", says="loaded on dp2"),
    Mutant(
        engine=MomentsExportedInHalfPrecision,
        killed_by="I20.adamw",
        issue="NeMo-RL #2372",
        says="weights right, first moments wrong",
    ),
    Mutant(
        engine=ScheduleNotSaved,
        killed_by="I11.portable-to-reference",
        issue="NeMo-RL #3171",
        says=r"progress moved from .*lr_steps=0",
    ),
    Mutant(
        engine=MomentsNotLoaded,
        killed_by="I11.portable-from-reference",
        issue="NeMo-RL #3171",
        says="exp_avg moved",
    ),
    Mutant(
        engine=WritesBothCopies,
        killed_by="I10.export",
        issue="verl #6334",
        says="written once",
        family="qwen3",
    ),
    Mutant(
        engine=HeadUnderAPrivateName,
        killed_by="I10.export-value-head",
        issue="private names",
        says="score.weight",
    ),
    Mutant(engine=VectorsNotLoaded, killed_by="I10.import", issue="Megatron-LM #1446", says="only norms"),
    Mutant(
        engine=UploadsOldWeights, killed_by="I12.disk", issue="verl #7014", says="parameters of the export"
    ),
    Mutant(
        engine=LoadsAnything, killed_by="I11.damaged", issue="partial checkpoints", says="CheckpointDamaged"
    ),
)
