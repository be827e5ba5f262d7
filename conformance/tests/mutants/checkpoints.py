"""Saving, loading, exporting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.checkpoint.shards import Shard, write_shards
from core_rl.distributed.process_group import RankAddress
from core_rl.reference.train import ReferenceEngine
from mutants.bases import Replicated
from mutants.zoo import DP2, Mutant


class MomentsDropped(ReferenceEngine):
    """Sharded checkpoints hold weights only, and load without a word."""

    def _shards(self, with_optimizer: bool) -> Iterator[Shard]:
        return (shard for shard in super()._shards(with_optimizer) if not shard.name.startswith("exp_avg"))

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        super()._load_shards(directory, with_optimizer=False)


class StepCountStartsAgain(ReferenceEngine):
    """The step count of the bias correction is not restored."""

    def _set_update_count(self, count: int) -> None:
        super()._set_update_count(0)


class RandomStateStartsAgain(ReferenceEngine):
    """Dropout after a resume is another one."""

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        super()._load_shards(directory, with_optimizer)
        torch.manual_seed(0)


class FrozenWeightsNotSaved(ReferenceEngine):
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

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        if self.world.rank == 0:
            super()._load_shards(directory, with_optimizer)


class MomentsExportedInHalfPrecision(ReferenceEngine):
    """What leaves the engine as float32 was rounded on the way."""

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, value in super()._named_tensors(kind):
            rounded = kind == "exp_avg" and value is not None
            yield name, value.bfloat16().float() if rounded and value is not None else value


class ScheduleNotSaved(ReferenceEngine):
    """A portable checkpoint begins the schedule again."""

    def save(self, meta: SaveLoadMeta) -> None:
        progress = self.progress
        if meta.format == "portable":
            self.restore_progress(replace(progress, lr_steps=0))
        super().save(meta)
        self.restore_progress(progress)


class MomentsNotLoaded(ReferenceEngine):
    """A portable checkpoint fills the weights; the optimizer begins again."""

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        if kind not in ("exp_avg", "exp_avg_sq"):
            super()._load_named_tensors(kind, source)


class WritesBothCopies(ReferenceEngine):
    """An export holds the tied matrix under both names."""

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        shapes = super()._tensor_shapes(kind)
        if kind == "params":
            shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
        return shapes

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        yield from super()._named_tensors(kind)
        if kind == "params":
            yield "lm_head.weight", self.model.get_output_embeddings().weight.detach().clone()


class HeadUnderAPrivateName(ReferenceEngine):
    """The value head is exported under a name that transformers does not know."""

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, value in super()._named_tensors(kind):
            yield ("v_head.weight" if kind == "params" and name == "score.weight" else name), value


class VectorsNotLoaded(ReferenceEngine):
    """A load leaves the norms as they were."""

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        vectors = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.dim() < 2}
        super()._load_named_tensors(kind, source)
        if kind == "params":
            with torch.no_grad():
                for name, value in vectors.items():
                    self.model.get_parameter(name).copy_(value)


class UploadsOldWeights(ReferenceEngine):
    """The weights of the first upload are sent again and again."""

    _sent: dict[str, Tensor] | None = None

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind != "params":
            yield from super()._named_tensors(kind)
            return
        if self._sent is None:
            self._sent = {
                name: value.clone() for name, value in super()._named_tensors(kind) if value is not None
            }
        yield from self._sent.items()


class LoadsAnything(ReferenceEngine):
    """An overridden ``load`` skips the digests."""

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.format != "sharded":
            super().load(meta)
            return
        shards = Path(meta.path) / "shards"
        if any(shards.iterdir()):
            self._load_shards(shards, with_optimizer=True)


class RanksDrawTheirOwnWeights(Replicated):
    """Each rank draws what no file gives from a seed of its own."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        self.config = self.config.model_copy(update={"seed": self.config.seed + addr.rank})
        super()._build(addr, ft_spec)


class NewHeadIsZero(ReferenceEngine):
    """A new head begins at zero, and the trunk never learns."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        with torch.no_grad():
            if self.config.model.head == "value":
                self.model.get_parameter("score.weight").zero_()


class SnapshotByReference(ReferenceEngine):
    """What is written in the background is read from the live tensors."""

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            time.sleep(0.5)
            write_shards(directory, self.world.rank, self._shards(with_optimizer), self.world.size)

        return write


class WeightsByReference(ReferenceEngine):
    """Moments are copied for the background, and weights are not."""

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        copies = [
            shard if shard.name.startswith("master") else replace(shard, tensor=shard.tensor.clone())
            for shard in self._shards(with_optimizer)
        ]

        def write(directory: Path) -> None:
            time.sleep(0.5)
            write_shards(directory, self.world.rank, copies, self.world.size)

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
