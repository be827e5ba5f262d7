"""Saving, loading, exporting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.tensors import MappedSource, NamedTensors, TensorSource
from core_rl.checkpoint.background import DeferredWrite, write_in_background
from core_rl.checkpoint.contents import Contents
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.config.capability import Capability
from core_rl.engine.components import Persistence, TrainComponents
from core_rl.reference.train import ReferenceBackend
from core_rl.state.slices import Shard, copy_shards
from core_rl.state.store import TensorStore
from core_rl.toolkit.hf_state import HFShardedState
from mutants.bases import MOMENTS, CountsItself, OwnCheckpoint, OwnExport, Replicated, TrainContext, inside
from mutants.unchanged import unchanged
from mutants.zoo import DP2, Mutant


@Mutant("I11.resume", "AReaL #1468", "exp_avg after the load")
class MomentsDropped(OwnCheckpoint):
    """Sharded checkpoints hold weights only, and load without an error."""

    def kinds(self, with_optimizer: bool) -> tuple[str, ...]:
        return super().kinds(with_optimizer=False)


@Mutant("I11.load-after-use", "a count that only rises (I11)", "a step after '(sharded|portable)' was loaded")
class StepCountNeverFalls(CountsItself):
    """A load of an earlier checkpoint keeps the larger count of the bias correction."""

    largest = 0

    def after_load(self, kinds: frozenset[str]) -> None:
        self.largest = max(self.largest, self.counted or 0)
        super().after_load(kinds)

    def restored(self, count: int) -> int:
        return max(count, self.largest)


@Mutant("I11.resume", "NeMo-RL #3171", "of step 3 is .*the step count of the bias correction")
class StepCountStartsAgain(CountsItself):
    """The step count of the bias correction is not restored."""

    def restored(self, count: int) -> int:
        return 0


@Mutant("I11.resume", "random state", "'loss' of step 2 is .*: random state of dropout")
@inside(ReferenceBackend, "persistence")
class RandomStateStartsAgain(Persistence):
    """Dropout after a resume is another one."""

    def load(self, meta: SaveLoadMeta) -> None:
        super().load(meta)
        self.runtime.rng.load({"cpu": torch.Generator().manual_seed(0).get_state()})


@Mutant("I11.resume-frozen", "frozen parameters", "master after the load")
class FrozenWeightsNotSaved(OwnCheckpoint):
    """A checkpoint of the trained parameters only."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        trained = self.state().shapes("grads")
        with unchanged(part for part in self.state().local("master") if part.name not in trained):
            super().load_sharded(directory, with_optimizer)


@Mutant("I11.other-layout", "AReaL #1470", "loaded on dp2")
class OnlyRankZeroLoads(OwnCheckpoint):
    """On another number of ranks, only the first one finds its file."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        if self.context.world.rank == 0:
            super().load_sharded(directory, with_optimizer)


@Mutant(
    "contract.undeclared",
    "AReaL #1470",
    "'resharding' is not declared, and asking for it did not raise an UnsupportedCapability",
    undeclared=frozenset({Capability.RESHARDING}),
)
@inside(ReferenceBackend, "persistence")
class LoadsAtAnyLayout(Persistence):
    """A checkpoint of another layout is loaded, although its slices may not fit."""

    def contents(self) -> Contents:
        return replace(super().contents(), resharding=True)


@Mutant("I20.adamw", "NeMo-RL #2372", "weights right, first moments wrong")
class MomentsExportedInHalfPrecision(OwnExport):
    """The exported float32 moments were rounded to bfloat16."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            rounded = kind == "exp_avg" and value is not None
            yield name, value.bfloat16().float() if rounded and value is not None else value


@Mutant("I11.portable-to-reference", "NeMo-RL #3171", "progress moved from .*lr_steps=0")
@inside(ReferenceBackend, "persistence")
class ScheduleNotSaved(Persistence):
    """A portable checkpoint begins the schedule again."""

    def save(self, meta: SaveLoadMeta) -> None:
        progress = self.step.progress
        if meta.format == "portable":
            self.step.progress = replace(progress, lr_steps=0)
        super().save(meta)
        self.step.progress = progress


@Mutant("I11.portable-from-reference", "NeMo-RL #3171", "exp_avg moved")
class MomentsNotLoaded(OwnExport):
    """A portable checkpoint fills the weights; the optimizer begins again."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        if kind not in ("exp_avg", "exp_avg_sq"):
            super().import_tensors(kind, source)


@Mutant("I10.export", "verl #6334", "written once", family="qwen3")
class WritesBothCopies(OwnExport):
    """An export has the tied matrix under both names."""

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from super().export_tensors(kind)
        if kind == "params":
            yield "lm_head.weight", self.model.get_output_embeddings().weight.detach().clone()


@Mutant("I10.export-value-head", "private names", "score.weight")
class HeadUnderAPrivateName(OwnExport):
    """The value head is exported under a name that transformers does not know."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            yield ("v_head.weight" if kind == "params" and name == "score.weight" else name), value


@Mutant("I10.import", "Megatron-LM #1446", "only norms")
class VectorsNotLoaded(OwnExport):
    """A load leaves the norms as they were."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        vectors = (part for part in self.state().local("master") if part.tensor.dim() < 2)
        with unchanged(vectors if kind == "params" else ()):
            super().import_tensors(kind, source)


class _WithoutCarried(HFShardedState):
    """The state without entries outside the module."""

    def __init__(self, state: HFShardedState) -> None:
        vars(self).update(vars(state))
        self.carried = None


@Mutant("I10.carried", "TRL #6028", r"an 'hf' export lacks \['extra_head.steps'")
class CarriedDropped(ReferenceBackend):
    """Tensors of the checkpoint that the module does not hold are left out of all exports."""

    def state(self) -> HFShardedState:
        return _WithoutCarried(super().state())


@Mutant("I10.carried", "TRL #6028", r"an 'hf' export has other values of \['extra_tower")
@inside(ReferenceBackend, "tensors")
class CarriedCast(TensorStore):
    """Carried tensors are exported in the dtype of the engine, not in their own."""

    def stream(self, kind: str) -> NamedTensors:
        for name, value in super().stream(kind):
            cast = kind == "carried" and value is not None and value.is_floating_point()
            yield name, value.float() if cast and value is not None else value


@Mutant("I12.disk", "verl #7014", "parameters of the export")
class UploadsOldWeights(OwnExport):
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


@Mutant("I11.damaged", "partial checkpoints", "CheckpointDamaged")
@inside(ReferenceBackend, "persistence")
class LoadsAnything(Persistence):
    """A load skips the digests."""

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.format != "sharded":
            super().load(meta)
            return
        tensors, shards = self.runtime.tensors, Path(meta.path) / "shards"
        for kind in ("master", *tensors.optimizer_kinds) if any(shards.iterdir()) else ():
            names = {name: f"{kind}/{name}" for name in tensors.shapes(kind)}
            tensors.load(kind, MappedSource(ShardFiles(shards), names))


class _Misplaces(TensorStore):
    """Writes the slices of another place or kind while a ``portable`` checkpoint is saved."""

    saving = False

    def shards(self, kinds: Sequence[str]) -> Iterator[Shard]:
        shards = super().shards(kinds)
        yield from self.misplaced(shards) if self.saving else shards

    def misplaced(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """Faulty slices, which tile each tensor."""
        raise NotImplementedError


class _SwapsHalves(_Misplaces):
    """Writes each half of a matrix at the offset of the other half."""

    def misplaced(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        for shard in shards:
            rows, whole = shard.tensor.shape[:1].numel(), shard.tensor.shape == shard.global_shape
            if shard.tensor.dim() < 2 or rows % 2 or not whole:
                yield shard
                continue
            first, second = shard.tensor.chunk(2)
            yield replace(shard, tensor=second)
            yield replace(shard, tensor=first, offsets=(rows // 2, *shard.offsets[1:]))


class _SwapsMoments(_Misplaces):
    """Writes each moment under the key of the other moment."""

    def misplaced(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        other = dict(zip(MOMENTS, reversed(MOMENTS), strict=True))
        for shard in shards:
            kind, _, name = shard.name.partition("/")
            yield replace(shard, name=f"{other.get(kind, kind)}/{name}")


class _SavesMisplaced(Persistence):
    """Tells the store when a ``portable`` checkpoint is saved."""

    def save(self, meta: SaveLoadMeta) -> None:
        tensors = self.runtime.tensors
        assert isinstance(tensors, _Misplaces)
        tensors.saving = meta.format == "portable"
        super().save(meta)
        tensors.saving = False


@Mutant("I11.load-after-use", "AReaL #1470", "master after 'portable' was loaded")
class SlicesAtOtherOffsets(ReferenceBackend):
    """The slices of a ``portable`` checkpoint are at the offsets of other slices."""

    components = TrainComponents(tensors=_SwapsHalves, persistence=_SavesMisplaced)


@Mutant("I11.load-after-use", "NeMo-RL #3171", "exp_avg after 'portable' was loaded")
class MomentsUnderSwappedKeys(ReferenceBackend):
    """A ``portable`` checkpoint has each moment under the name of the other."""

    components = TrainComponents(tensors=_SwapsMoments, persistence=_SavesMisplaced)


@Mutant("I3.from-config", "SkyRL #1725", "drawn from seed", layout=DP2)
class RanksDrawTheirOwnWeights(Replicated):
    """Each rank draws missing weights from a seed of its own."""

    def build(self, context: TrainContext) -> None:
        seed = context.seed + context.world.rank
        super().build(replace(context, config=context.config.model_copy(update={"seed": seed})))


@Mutant("I3.new-head", "new heads", "new head is zero")
class NewHeadIsZero(ReferenceBackend):
    """A new head begins at zero, and the trunk never learns."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        with torch.no_grad():
            if self.context.config.model.head == "value":
                self.model.get_parameter("score.weight").zero_()


class _SavesByReference(Persistence):
    """Writes a sharded checkpoint in the background from live tensors."""

    copied: tuple[str, ...] = ()
    """The kinds that are copied first."""

    def save(self, meta: SaveLoadMeta) -> None:
        if meta.format != "sharded" or not meta.asynchronous:
            super().save(meta)
            return
        self.wait_for_saves()
        contents, run = self.contents(), self.runtime
        kinds = ("master", *contents.tensors.optimizer_kinds)
        shards = [
            replace(shard, tensor=shard.tensor.clone()) if shard.name.split("/")[0] in self.copied else shard
            for shard in contents.tensors.shards(kinds)
        ]

        def write(directory: Path) -> None:
            (directory / "shards").mkdir(exist_ok=True)
            copies = copy_shards(run.world.rank, shards)
            write_copies(directory / "shards", run.world.rank, copies, run.world.size)

        self.saving = write_in_background(
            meta.path,
            lambda directory: DeferredWrite(write),
            run.world,
            kind=meta.format,
            state=contents.state(with_optimizer=True),
            timeout_s=run.world.timeout_s,
        )


@Mutant("I11.asynchronous", "a snapshot by reference", "are those after the next steps: it holds no copies")
class SnapshotByReference(ReferenceBackend):
    """Background writes read from the live tensors."""

    components = TrainComponents(persistence=_SavesByReference)


@Mutant("I11.asynchronous", "a snapshot by reference", "are those after the next steps: it holds no copies")
@inside(ReferenceBackend, "persistence")
class WeightsByReference(_SavesByReference):
    """Moments are copied for the background, and weights are not."""

    copied = MOMENTS
