"""Expert parallelism: who computes what for whom, and how gradients of experts are added up."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from toy_ep.engine import ExpertParallelEngine

from core_rl.state.grad_norm import GradShard
from core_rl_conformance.profile import MOE
from mutants.zoo import DP2EP2, Mutant


class ExpertGradientsAveraged(ExpertParallelEngine):
    """Gradients of experts are divided by the ranks that share them, as those of copies would be."""

    def _reduce(self, name: str, grad: Tensor) -> None:
        super()._reduce(name, grad)
        if ".experts." in name:
            grad.div_(self.layout.ep)


class ExpertsSeeOwnTokensBackward(ExpertParallelEngine):
    """Gradients come back from the experts of this rank alone."""

    def _gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        everything = super()._gathered(rows, length, group)
        mine = torch.arange(len(everything)) == dist.get_rank(group)
        return torch.where(mine[:, None, None], everything, everything.detach())


class GatesStayAtHome(ExpertParallelEngine):
    """Tokens go to other ranks without their gates, so that experts there weigh them alike."""

    def _gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        everything = super()._gathered(rows, length, group)
        if rows.shape[1] > 2 or torch.equal(rows, rows.round()):  # tokens, or the numbers of experts
            return everything
        mine = torch.arange(len(everything)) == dist.get_rank(group)
        return torch.where(mine[:, None, None], everything, 0.5)


class ExpertsInterleaved(ExpertParallelEngine):
    """Two ranks take themselves for the owners of some experts, and nobody of others."""

    def _owners(self, experts: Tensor, count: int) -> Tensor:
        owners = super()._owners(experts, count)
        return owners if self.world.rank == 0 else experts % self.layout.ep


class NormWithoutOtherExperts(ExpertParallelEngine):
    """The norm counts the experts of the first rank, and of the others what all ranks have."""

    def _grad_shards(self) -> Iterable[GradShard]:
        for shard in super()._grad_shards():
            grad = shard.grad.clone() if ".experts." in shard.name else shard.grad
            if ".experts." in shard.name:
                grad[len(grad) // self.layout.ep :] = 0
            yield GradShard(shard.name, grad, shard.duplicates)


MUTANTS = (
    Mutant(
        engine=ExpertGradientsAveraged,
        killed_by="I1.gradients",
        issue="Megatron-LM, the factor of expert parallel gradients",
        says="experts",
        layout=DP2EP2,
        family=MOE,
    ),
    Mutant(
        engine=ExpertsSeeOwnTokensBackward,
        killed_by="I1.gradients",
        issue="an exchange whose backward pass is local",
        says="gradients",
        layout=DP2EP2,
        family=MOE,
    ),
    Mutant(
        engine=GatesStayAtHome,
        killed_by="I7.logprobs",
        issue="tokens that travel without their gates",
        says="logprobs at temperature 1",
        layout=DP2EP2,
        family=MOE,
    ),
    Mutant(
        engine=ExpertsInterleaved,
        killed_by="I7.logprobs",
        issue="contiguous and interleaved experts, mixed up",
        says="logprobs at temperature 1",
        layout=DP2EP2,
        family=MOE,
    ),
    Mutant(
        engine=NormWithoutOtherExperts,
        killed_by="I4.grad-norm",
        issue="Megatron-LM #5916",
        says="the norm",
        layout=DP2EP2,
        family=MOE,
    ),
)
