"""Context parallelism: edges between shards of tokens, attention across them, and gradients that are parts of a sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from toy_cp.collectives import gather_parts
from toy_cp.engine import ContextParallelBackend
from toy_cp.shard import TokenShard, UlyssesShard, attention
from toy_cp.ulysses import UlyssesBackend

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from mutants.bases import OwnNorm, inside
from mutants.zoo import CP2, CP4, Mutant

# ------------------------------------------------------------------- gradients


@Mutant("I1.gradients", "SkyRL #1420", r"multiplied by (0\.5|1/2)", layout=CP2)
class GradientsAveragedOverShards(ContextParallelBackend):
    """Gradients are averaged over all ranks that hold the weights, and only the data-parallel ones are undone."""

    def reduce(self, name: str, grad: Tensor) -> None:
        super().reduce(name, grad)
        grad /= self.context.layout.cp


@Mutant("I1.train-batch", "SkyRL #1420, in the loss", "weights after train_batch", layout=CP2)
class LossDividedByShards(ContextParallelBackend):
    """The loss of every rank is taken for a part of the whole: it is divided by their number for the backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                (loss / self.context.layout.cp).backward()


@Mutant("I1.gradients", "slime #1748", "multiplied by 2", layout=CP2)
@inside(ContextParallelBackend, "shard_type")
class OutputGatherSumsDuplicates(TokenShard):
    """Every rank computes the same loss, and its gradient counts once for each."""

    def gathered(self, value: Tensor) -> Tensor:
        return gather_parts(value, self.sizes, 0, self.group)[: self.batch.num_tokens]


@Mutant("I1.gradients", "SkyRL #1420, the reduction itself", "gradients of TokenMeanLoss", layout=CP2)
class ShardGradientsNotReduced(ContextParallelBackend):
    """Gradients are added up over data-parallel ranks only."""

    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad, group=self.context.groups.data_parallel.group)


@Mutant("I3.gradients-after-steps", "Megatron-LM #1446, for the other axis", "after 2 steps", layout=CP2)
class NormsReducedOnOneRank(ContextParallelBackend):
    """The rank that exports has the whole gradient of norms; the others step with that of their own tokens."""

    def reduce(self, name: str, grad: Tensor) -> None:
        local_grad = grad.clone()
        super().reduce(name, grad)
        if "norm" in name and self.context_parallel_rank > 0:
            grad.copy_(local_grad)


@Mutant("I1.gradients", "slime #1748, the other way round", "gradients of TokenMeanLoss", layout=CP2)
@inside(ContextParallelBackend, "shard_type")
class KeysKeepOwnGradients(TokenShard):
    """Other ranks' keys and values come without a graph."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        local = torch.stack([key, value])
        full = gather_parts(local.detach(), self.sizes, 3, self.group)
        before, after = full[:, :, :, : self.start], full[:, :, :, self.stop :]
        both = torch.cat([before, local, after], dim=3)
        return attention(query, *self.by_query_head(query, both), self.visible(), scale, dropout)


@Mutant(
    "I4.grad-norm", "AReaL #1497, for context parallelism", r"the reported norm[\s\S]*1\.41421", layout=CP2
)
class CopiesCountedInTheNorm(ContextParallelBackend, OwnNorm):
    """The norm counts the weights once for each rank that shares a batch."""

    def counted(self) -> Iterable[LocalSlice]:
        for part in super().counted():
            yield replace(part, replica=part.replica // self.context.layout.cp)


# ----------------------------------------------------------------- shard edges


@Mutant("I7.logprobs", "labels are shifted after the batch is cut", "edges of the shards", layout=CP2)
@inside(ContextParallelBackend, "shard_type")
class ShiftedWithinTheShard(TokenShard):
    """Labels are shifted after the batch was cut: the last state of a shard predicts its first token."""

    def next_ids(self) -> Tensor:
        return self.own(self.input_ids).roll(-1)


def _kept(shard: TokenShard) -> list[int]:
    """The numbers of tokens of the shards, without what filled up the batch."""
    starts = [sum(shard.sizes[:rank]) for rank in range(len(shard.sizes))]
    tokens = shard.batch.num_tokens
    return [max(0, min(size, tokens - start)) for start, size in zip(starts, shard.sizes, strict=True)]


@Mutant("I7.entropy", "outputs are shifted after the batch is cut", "edges of the shards", layout=CP2)
class EdgeFromOwnLastState(ContextParallelBackend):
    """Outputs are moved to the predicted token inside each shard: its first one gets the prediction of its own last
    state."""

    def follows(self, states: Tensor, shard: TokenShard) -> Tensor:
        return torch.cat([part.roll(1, 0) for part in states.split(_kept(shard))])


@Mutant("I7.values", "verl #3287, at the edges of shards", r"all zero[\s\S]*edges of the shards", layout=CP2)
class EdgeIsNotPredicted(ContextParallelBackend):
    """Each shard drops the prediction of its last state, whose token it does not have."""

    def follows(self, states: Tensor, shard: TokenShard) -> Tensor:
        parts = []
        for part in states.split(_kept(shard)):
            keep_mask = torch.ones(len(part), dtype=torch.bool)
            keep_mask[:1] = False
            rolled = part.roll(1, 0)
            parts.append(torch.where(keep_mask if rolled.dim() == 1 else keep_mask[:, None], rolled, 0.0))
        return torch.cat(parts)


@Mutant(
    "I7.logprobs",
    "position ids are made after the batch is cut",
    "logprobs at temperature 1",
    layout=CP2,
    family="gpt2",
)
@inside(ContextParallelBackend, "shard_type")
class PositionsRestartAtShards(TokenShard):
    """The position of a token is its place in the shard."""

    def position_ids(self) -> Tensor:
        return torch.arange(self.stop - self.start)


@Mutant("I7.logprobs", "AReaL #1442, the other way round", "logprobs at temperature 1", layout=CP2)
@inside(ContextParallelBackend, "shard_type")
class AttentionStopsAtShards(TokenShard):
    """A sequence that crosses an edge is two sequences."""

    def visible(self) -> Tensor:
        seen = super().visible()
        inside = torch.zeros_like(seen)
        inside[:, self.start : self.stop] = True
        return seen & inside


@Mutant("I7.scores", "the tokens that fill up the last shard", "scores", layout=CP2)
class PaddingEndsTheLastSequence(ContextParallelBackend):
    """The batch is filled up to a multiple of the ranks with states of 0, which belong to its last sequence."""

    def ends(self, states: Tensor, batch: SequenceBatch) -> Tensor:
        result = super().ends(states, batch)
        filled_up = batch.num_tokens % self.context.layout.cp > 0
        return torch.cat([result[:-1], torch.zeros_like(result[-1:])]) if filled_up else result


@Mutant(
    "I1.combined-batches",
    "verl #5591, for a rank without tokens",
    "rank 1 was killed|during forward_backward",
    layout=CP2,
    timeout_s=10.0,
)
class IdleWithoutTokens(ContextParallelBackend):
    """A rank that got none of the tokens does not run the model, and the others wait for its keys."""

    def trunk(self, shard: TokenShard) -> Tensor:
        if shard.start >= shard.batch.num_tokens:
            return torch.zeros(shard.stop - shard.start, self.model.config.hidden_size)
        return super().trunk(shard)


# ----------------------------------------------------------------------- heads


@Mutant("I7.logprobs", "key/value heads fewer than ranks", "logprobs at temperature 1", layout=CP4)
@inside(UlyssesBackend, "shard_type")
class FewKeyHeadsInTurn(UlyssesShard):
    """Rank ``r`` takes the key/value head ``r % kv_heads``."""

    def by_query_head(self, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        if both.shape[2] >= len(self.sizes):
            return super().by_query_head(query, both)
        key, value = both.repeat(1, 1, query.shape[1] // both.shape[2], 1, 1)
        return key, value


@Mutant("I3.few-kv-heads", "key/value heads fewer than ranks", r"gradients[\s\S]*[kv]_proj", layout=CP2)
@inside(UlyssesBackend, "shard_type")
class CopiedKeyHeadsWithoutGradient(UlyssesShard):
    """With fewer key/value heads than ranks, only the first rank trains them."""

    def by_query_head(self, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        if both.shape[2] < len(self.sizes) and self.rank > 0:
            both = both.detach() + 0.0 * both
        return super().by_query_head(query, both)


@Mutant(
    "contract.heads-over-cp",
    "a degree that does not divide the heads, rounded down",
    "log-probs of a model with 5 heads at cp2",
    layout=CP2,
)
@inside(UlyssesBackend, "shard_type")
class LosesTheLastHead(UlyssesShard):
    """Heads that the ranks do not divide are left out."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        result = super().attend(query, key, value, scale, dropout)
        taken = query.shape[1] // len(self.sizes) * len(self.sizes)
        return torch.cat([result[:, :taken], torch.zeros_like(result[:, taken:])], dim=1)
