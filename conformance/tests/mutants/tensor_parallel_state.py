"""Tensor parallelism: local weights, exports and saves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from toy_tp.collectives import enter
from toy_tp.engine import TensorParallelBackend

from core_rl.backend.tensors import MappedSource, NamedTensors, TensorSource
from core_rl.state.slices import Shard
from mutants.bases import OwnCheckpoint, OwnExport, TrainContext
from mutants.unchanged import unchanged
from mutants.zoo import TP2, Mutant


class _LeavesBehind(TensorParallelBackend):
    """All ranks but the first leave some parameters as they were."""

    def stays(self, name: str) -> bool:
        """Whether the parameter ``name`` does not move."""
        raise NotImplementedError

    def step(self, scale: float, lr: float, count: int) -> None:
        behind = self.tensor_parallel_rank > 0
        with unchanged(p for p in self.state().local("master") if behind and self.stays(p.name)):
            super().step(scale, lr, count)


class TiedShardStays(_LeavesBehind):
    """The second rank's rows of the tied embedding are not in its optimizer."""

    def stays(self, name: str) -> bool:
        return name == "model.embed_tokens.weight"


class ReplicasDriftApart(_LeavesBehind):
    """Only the rank that exports trains the norms."""

    def stays(self, name: str) -> bool:
        return name.endswith("norm.weight")


class ScalarHeadTrainsOnOneRank(_LeavesBehind):
    """Only the rank that exports trains the value head."""

    def stays(self, name: str) -> bool:
        return name == "score.weight"


class RanksDrawTheirOwnHeads(TensorParallelBackend):
    """A new head is drawn from another seed on each rank."""

    def seed(self) -> int:
        return self.context.seed + (self.tensor_parallel_rank if self.context.config.model.path else 0)


class ScalarHeadLoadsOnOneRank(TensorParallelBackend, OwnExport):
    """Only the rank that exports takes the value head of a checkpoint."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        behind = self.tensor_parallel_rank > 0
        with unchanged(p for p in self.state().local("master") if behind and p.name == "score.weight"):
            super().import_tensors(kind, source)


class HeadUntiedOnOneRank(TensorParallelBackend):
    """The second rank's rows of the head are a copy that stays as it was."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.head == "lm":
            self.copy = self.head_weight().detach().clone()

    def columns(self, states: Tensor) -> Tensor:
        if self.tensor_parallel_rank == 0:
            return super().columns(states)
        weight = self.head_weight()
        # The right gradient, at other values.
        attached = self.copy + weight - weight.detach()
        return F.linear(enter(states, self.tensor_parallel_group), attached)


class ShardsExportedInTheWrongOrder(TensorParallelBackend, OwnExport):
    """The parts of queries, keys and values are joined in the reverse order of their ranks."""

    def export_tensors(self, kind: str) -> NamedTensors:
        weights = kind in ("params", "master")
        for name, tensor in super().export_tensors(kind):
            if weights and re.search(r"[qkv]_proj\.", name) and tensor is not None:
                yield name, torch.cat(tensor.chunk(self.context.layout.tp)[::-1])
            else:
                yield name, tensor


class _HalvesRoundedDown(MappedSource):
    """The second half of the rows begins at half of them, rounded down."""

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        if slices is not None and slices[0].start > 0:
            first = self.shape(name)[0] // 2
            slices = (slice(first, first + slices[0].stop - slices[0].start), *slices[1:])
        return super().read(name, slices)


class OddVocabularyShifts(TensorParallelBackend, OwnExport):
    """When it loads, the second part of an odd vocabulary is taken to begin at half of it, rounded down."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, _HalvesRoundedDown(source, {name: name for name in source.names()}))


class NormSavedInPart(TensorParallelBackend, OwnCheckpoint):
    """A norm of the model's own counts as sharded when it is saved: 1/TP of it is written."""

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        for shard in super().shards(with_optimizer):
            in_part = shard.name.startswith("master/") and "_norm." in shard.name
            written = len(shard.tensor) // self.context.layout.tp if in_part else len(shard.tensor)
            missing = torch.zeros_like(shard.tensor[written:])
            yield replace(shard, tensor=torch.cat([shard.tensor[:written], missing]))


MUTANTS = (
    Mutant(
        engine=RanksDrawTheirOwnHeads,
        killed_by="I3.value-gradients-after-steps",
        issue="each rank draws a new head (SkyRL #1725's kind)",
        says="gradients after 2 steps",
        layout=TP2,
    ),
    Mutant(
        engine=ScalarHeadTrainsOnOneRank,
        killed_by="I3.value-gradients-after-steps",
        issue="replicas that drift apart",
        says="gradients after 2 steps",
        layout=TP2,
    ),
    Mutant(
        engine=ScalarHeadLoadsOnOneRank,
        killed_by="I3.value-gradients-after-load",
        issue="vllm #44371, for a train engine",
        says="gradients after a load",
        layout=TP2,
    ),
    Mutant(
        engine=ReplicasDriftApart,
        killed_by="I20.adamw",
        issue="replicas that drift apart",
        says="logprobs after 8 steps",
        layout=TP2,
    ),
    Mutant(
        engine=TiedShardStays,
        killed_by="I20.all-move",
        issue="verl #6334",
        says=r"entries of model\.embed_tokens\.weight have a gradient and did not move",
        layout=TP2,
        family="qwen3",
    ),
    Mutant(
        engine=HeadUntiedOnOneRank,
        killed_by="I10.tied-after-steps",
        issue="Automodel #2511",
        says="logprobs after steps with a tied embedding",
        layout=TP2,
        family="qwen3",
    ),
    Mutant(
        engine=ShardsExportedInTheWrongOrder,
        killed_by="I10.import",
        issue="heads in the wrong order",
        says=r"parameters after a load[\s\S]*q_proj",
        layout=TP2,
    ),
    Mutant(
        engine=OddVocabularyShifts,
        killed_by="I10.import",
        issue="an odd vocabulary (I10)",
        says=r"parameters after a load[\s\S]*embed_tokens",
        layout=TP2,
        family="qwen3",
    ),
    Mutant(
        engine=NormSavedInPart,
        killed_by="I11.other-layout",
        issue="AReaL #1470",
        says=r"master loaded on dp2[\s\S]*_norm\.weight",
        layout=TP2,
        family="qwen3",
    ),
)
