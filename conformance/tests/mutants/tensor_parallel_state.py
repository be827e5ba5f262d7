"""Tensor parallelism: local weights, exports and saves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

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

OverTwoRanks = partial(Mutant, layout=TP2, family="qwen3")


class _LeavesBehind(TensorParallelBackend):
    """All ranks but the first leave some parameters as they were."""

    def stays(self, name: str) -> bool:
        """Whether the parameter ``name`` does not move."""
        raise NotImplementedError

    def step(self, scale: float, lr: float, count: int) -> None:
        behind = self.tensor_parallel_rank > 0
        with unchanged(p for p in self.state().local("master") if behind and self.stays(p.name)):
            super().step(scale, lr, count)


@OverTwoRanks(
    "I20.all-move", "verl #6334", r"entries of model\.embed_tokens\.weight have a gradient and did not move"
)
class TiedShardStays(_LeavesBehind):
    """The second rank's rows of the tied embedding are not in its optimizer."""

    def stays(self, name: str) -> bool:
        return name == "model.embed_tokens.weight"


@Mutant("I20.adamw", "replicas that drift apart", "logprobs after 8 steps", layout=TP2)
class ReplicasDriftApart(_LeavesBehind):
    """Only the rank that exports trains the norms."""

    def stays(self, name: str) -> bool:
        return name.endswith("norm.weight")


@Mutant("I3.value-gradients-after-steps", "replicas that drift apart", "gradients after 2 steps", layout=TP2)
class ScalarHeadTrainsOnOneRank(_LeavesBehind):
    """Only the rank that exports trains the value head."""

    def stays(self, name: str) -> bool:
        return name == "score.weight"


@Mutant(
    "I3.value-gradients-after-steps",
    "each rank draws a new head (SkyRL #1725's kind)",
    "gradients after 2 steps",
    layout=TP2,
)
class RanksDrawTheirOwnHeads(TensorParallelBackend):
    """A new head is drawn from another seed on each rank."""

    def seed(self) -> int:
        return self.context.seed + (self.tensor_parallel_rank if self.context.config.model.path else 0)


@Mutant(
    "I3.value-gradients-after-load", "vllm #44371, for a train engine", "gradients after a load", layout=TP2
)
class ScalarHeadLoadsOnOneRank(TensorParallelBackend, OwnExport):
    """Only the rank that exports takes the value head of a checkpoint."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        behind = self.tensor_parallel_rank > 0
        with unchanged(p for p in self.state().local("master") if behind and p.name == "score.weight"):
            super().import_tensors(kind, source)


@OverTwoRanks("I10.tied-after-steps", "Automodel #2511", "logprobs after steps with a tied embedding")
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


@Mutant("I10.import", "heads in the wrong order", r"parameters after a load[\s\S]*q_proj", layout=TP2)
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


@OverTwoRanks("I10.import", "an odd vocabulary (I10)", r"parameters after a load[\s\S]*embed_tokens")
class OddVocabularyShifts(TensorParallelBackend, OwnExport):
    """When it loads, the second part of an odd vocabulary is taken to begin at half of it, rounded down."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, _HalvesRoundedDown(source, {name: name for name in source.names()}))


@OverTwoRanks("I11.other-layout", "AReaL #1470", r"master loaded on dp2[\s\S]*_norm\.weight")
class NormSavedInPart(TensorParallelBackend, OwnCheckpoint):
    """A norm of the model's own counts as sharded when it is saved: 1/TP of it is written."""

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        for shard in super().shards(with_optimizer):
            in_part = shard.name.startswith("master/") and "_norm." in shard.name
            written = len(shard.tensor) // self.context.layout.tp if in_part else len(shard.tensor)
            missing = torch.zeros_like(shard.tensor[written:])
            yield replace(shard, tensor=torch.cat([shard.tensor[:written], missing]))
