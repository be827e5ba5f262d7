"""Expert parallelism: ownership of experts, and how gradients of experts are added up."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from toy_ep.engine import ExpertParallelBackend

from core_rl.backend.tensors import LocalSlice
from core_rl_conformance.profile import MOE
from mutants.bases import OwnNorm
from mutants.zoo import DP2EP2, Mutant


@Mutant(
    "I1.gradients",
    "Megatron-LM, the factor of expert parallel gradients",
    "experts",
    layout=DP2EP2,
    family=MOE,
)
class ExpertGradientsAveraged(ExpertParallelBackend):
    """Gradients of experts are divided by the ranks that share them, as with copies."""

    def reduce(self, name: str, grad: Tensor) -> None:
        super().reduce(name, grad)
        if ".experts." in name:
            grad.div_(self.context.layout.ep)


@Mutant("I1.gradients", "an exchange whose backward pass is local", "gradients", layout=DP2EP2, family=MOE)
class ExpertsSeeOwnTokensBackward(ExpertParallelBackend):
    """Gradients come back from the experts of this rank alone."""

    def gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        everything = super().gathered(rows, length, group)
        mine = torch.arange(len(everything)) == dist.get_rank(group)
        return torch.where(mine[:, None, None], everything, everything.detach())


@Mutant(
    "I7.logprobs",
    "tokens that travel without their gates",
    "logprobs at temperature 1",
    layout=DP2EP2,
    family=MOE,
)
class GatesStayAtHome(ExpertParallelBackend):
    """Tokens go to other ranks without their gates, so that experts there weigh them alike."""

    def gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        everything = super().gathered(rows, length, group)
        if rows.shape[1] > 2 or torch.equal(rows, rows.round()):  # tokens, or the numbers of experts
            return everything
        mine = torch.arange(len(everything)) == dist.get_rank(group)
        return torch.where(mine[:, None, None], everything, 0.5)


@Mutant(
    "I7.logprobs",
    "contiguous and interleaved experts, mixed up",
    "logprobs at temperature 1",
    layout=DP2EP2,
    family=MOE,
)
class ExpertsInterleaved(ExpertParallelBackend):
    """Two ranks take themselves for the owners of some experts, and no rank of others."""

    def owners(self, experts: Tensor, count: int) -> Tensor:
        owners = super().owners(experts, count)
        return owners if self.context.world.rank == 0 else experts % self.context.layout.ep


@Mutant("I4.grad-norm", "Megatron-LM #5916", "the norm", layout=DP2EP2, family=MOE)
class NormWithoutOtherExperts(ExpertParallelBackend, OwnNorm):
    """The norm counts the experts of the first rank, and of the others what all ranks have."""

    def counted(self) -> Iterable[LocalSlice]:
        share = self.model.config.num_experts // self.context.layout.ep
        for part in super().counted():
            expert = re.search(r"\.experts\.(\d+)\.", part.name)
            if expert is None or int(expert[1]) < share:
                yield part
