"""Tensor parallelism: norms over shards, gradients of replicated parameters, and the parallel vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_tp.collectives import add_up, enter, gather
from toy_tp.engine import BEFORE_COLUMN, TensorParallelBackend, partial_gradient, replicated_factor
from toy_tp.vocabulary import Vocabulary
from transformers import PreTrainedModel

from core_rl.backend.tensors import LocalSlice
from core_rl.config.capability import Capability
from core_rl.distributed.comm import Comm
from core_rl.state.store import global_grad_norm
from mutants.bases import OwnNorm, inside
from mutants.zoo import TP2, TP2SP, Mutant

# ------------------------------------------------------------------------ norm


@Mutant("I4.grad-norm", "AReaL #1497", r"the reported norm[\s\S]*they differ by", layout=TP2)
class ReplicasCountedOnEachRank(TensorParallelBackend, OwnNorm):
    """Each rank adds the replicated parameters to the norm."""

    def counted(self) -> Iterable[LocalSlice]:
        return (replace(part, replica=0) for part in super().counted())


@Mutant(
    "I4.grad-norm",
    "torchtitan #649, Megatron-LM #5916",
    r"the reported norm[\s\S]*they differ by",
    layout=TP2,
)
class NormOfOneRanksShards(TensorParallelBackend, OwnNorm):
    """The norm is that of the first rank's parts."""

    def counted(self) -> Iterable[LocalSlice]:
        return super().counted() if self.context.world.rank == 0 else ()


@Mutant("I4.clipping", "clipping by shard", "after clipped steps", layout=TP2)
class ClipsByItsOwnNorm(TensorParallelBackend):
    """The reported norm is right; each rank clips by the norm of its own parts."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.context.config.optimizer is not None
        limit = self.context.config.optimizer.max_grad_norm
        if limit is not None:
            local = (replace(part, replica=0) for part in self.state().local("grads"))
            scale = min(1.0, limit / (global_grad_norm(local, Comm()) + 1e-6))
        super().step(scale, lr, count)


# ------------------------------------------------------------------- gradients


@Mutant(
    "I1.gradients",
    "Megatron-LM #1446",
    r"gradients of TokenMeanLoss[\s\S]*_norm\.weight",
    layout=TP2,
    family="qwen3",
)
class HeadNormsNotReduced(TensorParallelBackend):
    """The norms of queries and keys keep the gradient of one rank's heads."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if not partial_gradient(name):
            super().reduce(name, grad)


@Mutant(
    "I20.adapter-gradients",
    "Megatron-LM #1446, for an adapter",
    r"gradients with an adapter[\s\S]*lora_",
    layout=TP2,
    declared=frozenset({Capability.LORA}),
)
class FactorsNotReduced(TensorParallelBackend):
    """The replicated factor of an adapter keeps the gradient of one rank's features."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if not replicated_factor(name):
            super().reduce(name, grad)


@Mutant("I3.gradients-after-steps", "Megatron-LM #1446", "after 2 steps", layout=TP2, family="qwen3")
class HeadNormsReducedOnOneRank(TensorParallelBackend):
    """The rank that exports has the whole gradient of these norms; the others step with their own."""

    def reduce(self, name: str, grad: Tensor) -> None:
        local_grad = grad.clone()
        super().reduce(name, grad)
        if partial_gradient(name) and self.tensor_parallel_rank > 0:
            grad.copy_(local_grad)


@Mutant("I1.gradients", "SkyRL #1420, for the other axis", "gradients of TokenMeanLoss", layout=TP2)
class InputGradientNotReduced(TensorParallelBackend):
    """The input of column-parallel matrices gets the gradient of one rank's columns."""

    def enter_shards(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output


@Mutant("I1.gradients", "slime #1748", "multiplied by 2", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class GatherSumsDuplicates(Vocabulary):
    """Logits are gathered before the softmax, by a gather whose backward pass adds up."""

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(enter(gather(logits, self.sizes, self.group), self.group), dim=-1)
        return log_p.gather(1, ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


class _KeptForBackward(torch.autograd.Function):
    """``states @ weight.T``, whose gradient of the states uses another matrix."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, keep_mask: Tensor) -> Tensor:
        ctx.save_for_backward(states, keep_mask)
        return F.linear(states, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        states, retained = ctx.saved_tensors
        return grad @ retained, grad.T @ states, None


@Mutant(
    "I3.gradients-after-steps", "vllm #44371, in the backward pass", "gradients after 2 steps", layout=TP2
)
class BackwardKeepsOldHead(TensorParallelBackend):
    """A copy of the head is laid out for the backward pass once, and outlives the steps."""

    kept: Tensor | None = None

    def columns(self, states: Tensor) -> Tensor:
        weight = self.head_weight()
        if self.kept is None:
            self.kept = weight.detach().clone()
        result: Tensor = _KeptForBackward.apply(enter(states, self.tensor_parallel_group), weight, self.kept)  # type: ignore[no-untyped-call]
        return result


# --------------------------------------------------------------------- forward


@Mutant(
    "I7.logprobs", "a bias or residual before the sum over ranks", "logprobs at temperature 1", layout=TP2
)
class ResidualAddedOnEachRank(TensorParallelBackend):
    """The sum over ranks comes after the residual, which is added ``tp`` times."""

    def connect(self, model: PreTrainedModel) -> None:
        for name, module in model.named_modules():
            if name.endswith(BEFORE_COLUMN):
                module.register_forward_hook(self.enter_shards)
            elif name.endswith("o_proj") or re.search(r"layers\.\d+$", name):
                # The layer's output in place of down_proj's.
                module.register_forward_hook(self.leave_shards)


@Mutant("I7.logprobs", "a parallel log-softmax", "logprobs at temperature 1", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class MaximumOfOneShard(Vocabulary):
    """The softmax adds up exponentials that were shifted differently."""

    def highest(self, logits: Tensor) -> Tensor:
        return logits.detach().max(dim=-1).values


@Mutant("I7.logprobs", "a parallel log-softmax", "logprobs at temperature 1", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class PartitionOfOneShard(Vocabulary):
    """Each rank normalises over its own part of the vocabulary."""

    def partition(self, weights: Tensor) -> Tensor:
        return weights.sum(-1)


@Mutant("I7.entropy", "TRL #3715", "entropy at temperature 1", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class EntropyOverPaddedRows(Vocabulary):
    """Log-probs are over the vocabulary, and the entropy is over its padded form."""

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        drawn, _ = super().logprobs(logits, ids)
        _, entropy = super().logprobs(F.pad(logits, (0, 64 - logits.shape[1] % 64)), ids)
        return drawn, entropy


@Mutant("I7.logprobs", "a parallel log-softmax", "logprobs at temperature 1", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class TargetsOfOtherRanksLost(Vocabulary):
    """The sum over ranks of the chosen logits is left out."""

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        highest = self.highest(logits)[:, None]
        mask, index = self.own_rows(ids, logits.shape[1])
        shifted = logits - highest
        drawn = torch.where(mask, shifted.gather(1, index[:, None]).squeeze(1), 0.0)
        weights = shifted.exp()
        partition = self.partition(weights)
        return drawn - partition.log(), self.entropy(shifted, weights, partition)


@Mutant("I7.entropy", "a parallel log-softmax", "entropy at temperature 1", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class EntropyOfOneShard(Vocabulary):
    """Log-probs are over the vocabulary, and the entropy's sum over one part of it."""

    def entropy(self, shifted: Tensor, weights: Tensor, partition: Tensor) -> Tensor:
        return partition.log() - (weights * shifted).sum(-1) / partition


@Mutant("I7.long-batch", "ranges that include their end", "logprobs of a long batch", layout=TP2)
@inside(TensorParallelBackend, "vocabulary_type")
class FirstRowOfAPartTwice(Vocabulary):
    """The first row of a rank's part counts on the rank before as well, which takes its own last one for it."""

    def own_rows(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        mask = (ids >= self.start) & (ids <= self.start + count)
        return mask, torch.where(mask, ids - self.start, 0).clamp(max=count - 1)


@Mutant(
    "I7.logprobs",
    "a bias or residual before the sum over ranks",
    "logprobs at temperature 1",
    layout=TP2,
    family="gemma2",
)
class RowBiasAddedOnEachRank(TensorParallelBackend):
    """Each rank adds the bias to its part of the sum."""

    def leave_shards(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias = self.row_biases.get(module)
        added = output if bias is None else output + bias.to_local()
        return self.own_tokens(add_up(added, self.tensor_parallel_group))


# ----------------------------------------------------------- sequence parallel


@Mutant("I1.gradients", "Megatron-LM #1446", r"gradients of TokenMeanLoss[\s\S]*norms", layout=TP2SP)
class NormsOfOwnTokens(TensorParallelBackend):
    """The norms of layers keep the gradient of one rank's tokens."""

    def is_partial(self, name: str) -> bool:
        return partial_gradient(name)


@Mutant(
    "I1.gradients", "Megatron-LM #1446", r"gradients of TokenMeanLoss[\s\S]*model\.norm\.weight", layout=TP2SP
)
class FinalNormOfOwnTokens(TensorParallelBackend):
    """The last of all norms is left out of the sum over ranks."""

    def is_partial(self, name: str) -> bool:
        return name != "model.norm.weight" and super().is_partial(name)


@Mutant(
    "I1.gradients",
    "Megatron-LM #1446, for a bias",
    r"gradients of TokenMeanLoss[\s\S]*o_proj\.bias",
    layout=TP2SP,
    family="gemma2",
)
class RowBiasOfOwnTokens(TensorParallelBackend):
    """A bias that each rank adds to its own tokens keeps the gradient of those."""

    def is_partial(self, name: str) -> bool:
        return not name.endswith("o_proj.bias") and super().is_partial(name)


@Mutant("I1.gradients", "slime #1748", "multiplied by 2", layout=TP2SP)
class RegionsSumDuplicates(TensorParallelBackend):
    """The last states are gathered with a backward pass that adds up what all ranks have alike."""

    def columns(self, states: Tensor) -> Tensor:
        return super().columns(enter(states, self.tensor_parallel_group))


# ---------------------------------------------------------------------- layout


@Mutant(
    "contract.heads-over-tp",
    "a degree that does not divide the heads",
    "took a model with 5 heads at tp2, and then it failed|at tp2",
    layout=TP2,
)
class TakesHalfAHead(TensorParallelBackend):
    """The degree is never compared with the number of heads."""

    def check_heads(self, model: PreTrainedModel) -> None:
        return


@Mutant("contract.heads-over-tp", "an error on one rank alone", "initialize", layout=TP2, timeout_s=8.0)
class OneRankRefuses(TensorParallelBackend):
    """The other rank waits for it."""

    def check_heads(self, model: PreTrainedModel) -> None:
        if self.tensor_parallel_rank == 0:
            super().check_heads(model)
        Comm(self.tensor_parallel_group).barrier()
