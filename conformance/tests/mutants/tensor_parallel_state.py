"""Tensor parallelism: what ranks hold, export and save."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from toy_tp.collectives import enter
from toy_tp.engine import TensorParallelEngine

from core_rl.backend.meta import FinetuneSpec, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.checkpoint import shards
from core_rl.distributed.process_group import RankAddress
from core_rl.state.gather import LocalPart
from mutants.zoo import TP2, Mutant


class _LeavesBehind(TensorParallelEngine):
    """All ranks but the first leave some parameters as they were."""

    def _stays(self, name: str) -> bool:
        raise NotImplementedError

    @torch.no_grad()
    def _step(self, scale: float) -> None:
        kept = [
            (self._local(parameter).tensor, self._local(parameter).tensor.clone())
            for name, parameter in self.model.named_parameters()
            if self.tensor_parallel_rank > 0 and self._stays(name)
        ]
        super()._step(scale)
        for parameter, before in kept:
            parameter.copy_(before)


class TiedShardStays(_LeavesBehind):
    """The second rank's rows of the tied embedding are not in its optimizer."""

    def _stays(self, name: str) -> bool:
        return name == "model.embed_tokens.weight"


class ReplicasDriftApart(_LeavesBehind):
    """Only the rank that exports trains the norms."""

    def _stays(self, name: str) -> bool:
        return name.endswith("norm.weight")


class ScalarHeadTrainsOnOneRank(_LeavesBehind):
    """Only the rank that exports trains the value head."""

    def _stays(self, name: str) -> bool:
        return name == "score.weight"


class RanksDrawTheirOwnHeads(TensorParallelEngine):
    """A new head is drawn from another seed on each rank."""

    def _seed(self) -> int:
        return self.config.seed + (self.tensor_parallel_rank if self.config.model.path else 0)


class ScalarHeadLoadsOnOneRank(TensorParallelEngine):
    """Only the rank that exports takes the value head of a checkpoint."""

    @torch.no_grad()
    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        score = dict(self.model.named_parameters()).get("score.weight")
        before = None if score is None else self._local(score).tensor.clone()
        super()._load_named_tensors(kind, source)
        if score is not None and before is not None and self.tensor_parallel_rank > 0:
            self._local(score).tensor.copy_(before)


class HeadUntiedOnOneRank(TensorParallelEngine):
    """The second rank's rows of the head are a copy that stays as it was."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        if self.config.model.head == "lm":
            self._copy = self.head_weight().detach().clone()

    def _columns(self, states: Tensor) -> Tensor:
        if self.tensor_parallel_rank == 0:
            return super()._columns(states)
        weight = self.head_weight()
        # The right gradient, at other values.
        attached = self._copy + weight - weight.detach()
        return F.linear(enter(states, self.tensor_parallel_group), attached)


class ShardsExportedInTheWrongOrder(TensorParallelEngine):
    """The parts of queries, keys and values are joined in the reverse order of their ranks."""

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        weights = kind in ("params", "master")
        for name, tensor in super()._named_tensors(kind):
            turned = weights and re.search(r"[qkv]_proj\.", name)
            yield (
                name,
                torch.cat(tensor.chunk(self.layout.tp)[::-1]) if turned and tensor is not None else tensor,
            )


class OddVocabularyShifts(TensorParallelEngine):
    """When it loads, the second part of an odd vocabulary is taken to begin at half of it, rounded down."""

    _loads = False

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        self._loads = True
        super()._load_named_tensors(kind, source)
        self._loads = False

    def _local(self, tensor: Tensor) -> LocalPart:
        part = super()._local(tensor)
        if self._loads and isinstance(tensor, DTensor) and tensor.placements[0] == Shard(0):
            first = tensor.shape[0] // self.layout.tp * self.tensor_parallel_rank
            return replace(part, offsets=(first, *part.offsets[1:]))
        return part


class NormSavedInPart(TensorParallelEngine):
    """A norm of the model's own counts as sharded when it is saved: 1/TP of it is written."""

    def _shards(self, with_optimizer: bool) -> Iterator[shards.Shard]:
        for shard in super()._shards(with_optimizer):
            in_part = shard.name.startswith("master/") and "_norm." in shard.name
            written = len(shard.tensor) // self.layout.tp if in_part else len(shard.tensor)
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
