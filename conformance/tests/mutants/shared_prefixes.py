"""Prefixes that sequences share: who sees whom, positions, gradients and masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.data.prefixes import PrefixTree
from core_rl.toolkit import packed
from core_rl.toolkit.parallel_context import ModelShards, TokenSlice
from core_rl.toolkit.routers import balance_loss, own_routing
from core_rl_conformance.profile import MOE
from mutants.bases import Packed, TrainContext
from mutants.zoo import Mutant

SHARED = frozenset({Capability.SHARED_PREFIX})

WithSharedPrefixes = partial(Mutant, declared=SHARED)


class Sharing(Packed):
    """Tokens that sequences share are computed once."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        arguments = (step.outputs, step.temperature, step.trained_only, step.share_prefixes)
        return ModelOutput(**self.packed(micro_batch, *arguments))

    def tree(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> PrefixTree | None:
        """The tree of the micro-batch, where there is one."""
        return PrefixTree.of(micro_batch) if step.share_prefixes else None


class _Bent(Sharing):
    """The rows of a tree are laid out otherwise."""

    shards: type[ModelShards]

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.packed.shards = self.shards()


@dataclass(frozen=True, kw_only=True)
class _AllBefore(ModelShards):
    def slice_of(self, batch: SequenceBatch, tree: PrefixTree | None = None) -> TokenSlice:
        if tree is not None:
            tree = replace(tree, paths=tuple(tuple(range(end + 1)) for end in range(len(tree.paths))))
        return super().slice_of(batch, tree)


@WithSharedPrefixes(
    "I1.combined-batches",
    "a tree mask that is causal over the rows of the pack",
    "(logprobs|entropy|values|scores) of a batch .*shared prefixes",
)
class SiblingsSeeEachOther(_Bent):
    """A branch attends to all branches before it."""

    shards = _AllBefore


@dataclass(frozen=True, kw_only=True)
class _Counting(ModelShards):
    def slice_of(self, batch: SequenceBatch, tree: PrefixTree | None = None) -> TokenSlice:
        tokens = super().slice_of(batch, tree)
        if tree is None:
            return tokens
        positions = tokens.position_ids.clone()
        for path in tree.paths:
            if len(path) > 1:
                start, end = tree.bounds[path[-1]], tree.bounds[path[-1] + 1]
                positions[start:end] = positions[start - 1] + 1 + torch.arange(end - start)
        return replace(tokens, position_ids=positions)


@WithSharedPrefixes(
    "I1.combined-batches",
    "position ids that are counted over a pack, as in transformers before packed position ids",
    "(logprobs|entropy|values|scores) of a batch .*shared prefixes",
)
class PositionsGoOnFromSibling(_Bent):
    """Positions of a branch continue from the branch before it."""

    shards = _Counting


@dataclass(frozen=True, kw_only=True)
class _RowBefore(TokenSlice):
    def here(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.tree is None:
            return super().here(positions)
        # The last token of the batch predicts nothing.
        rows = self.tree.rows[(positions + 1).clamp(max=len(self.tree.rows) - 1)] - 1
        return torch.arange(len(rows)), rows


@dataclass(frozen=True, kw_only=True)
class _LastRow(ModelShards):
    def slice_of(self, batch: SequenceBatch, tree: PrefixTree | None = None) -> TokenSlice:
        return _RowBefore(**vars(super().slice_of(batch, tree)))


@WithSharedPrefixes(
    "I1.combined-batches",
    "logits shifted by one over a pack, where the row before is another branch's",
    "(logprobs|entropy|values|scores) of a batch .*shared prefixes",
)
class FirstTokenFromSibling(_Bent):
    """The first token of a branch is predicted from the last state of the branch before it."""

    shards = _LastRow


@Mutant(
    "I17.routing-replay",
    "routing that is not laid out as its tokens are (I17)",
    "with another routing of shared prefixes",
    family=MOE,
    declared=SHARED | {Capability.ROUTING_REPLAY},
)
class ReplaysRowsOfTheBatch(Sharing):
    """The rows of a tree get the routing of the batch's first tokens."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        with patch.object(packed, "own_routing", _first_rows):
            return super().outputs(micro_batch, step)


def _first_rows(batch: SequenceBatch, tokens: TokenSlice) -> Tensor | None:
    if tokens.tree is not None:
        tokens = replace(tokens, tree=replace(tokens.tree, kept=torch.arange(len(tokens.tree.kept))))
    return own_routing(batch, tokens)


class _ScaledGradients(Sharing):
    """The gradients of shared states are scaled, by a power of the number of sequences that share them."""

    power: int

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        tree = self.tree(micro_batch, step)
        if tree is None or not torch.is_grad_enabled():
            return super().outputs(micro_batch, step)
        factors = tree.rows.bincount().float() ** self.power
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)

        def scale(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
            output.register_hook(lambda grad: grad * factors[:, None])

        hook = embedding.register_forward_hook(scale)
        try:
            return super().outputs(micro_batch, step)
        finally:
            hook.remove()


@WithSharedPrefixes(
    "I1.combined-batches",
    "keys and values that are expanded by a mean and not by a sum in the backward pass",
    "gradients of a batch .*shared prefixes",
)
class SharedGradientsAveraged(_ScaledGradients):
    """The gradient of a shared token is the mean over its sequences."""

    power = -1


@WithSharedPrefixes(
    "I1.combined-batches",
    "gradients of shared tokens that are multiplied by the size of the group",
    "gradients of a batch .*shared prefixes",
)
class SharedGradientsRepeated(_ScaledGradients):
    """The gradient of a shared token is counted once more for each of its sequences."""

    power = 1


@WithSharedPrefixes(
    "I1.combined-batches",
    "the loss mask of a packed group that is the first sequence's",
    "(the loss|gradients) of a batch .*shared prefixes",
)
class MaskOfFirstSequence(Sharing):
    """A shared token is trained where the first of its sequences trains it."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output, tree = super().outputs(micro_batch, step), self.tree(micro_batch, step)
        if tree is None or output.logprobs is None or not step.trained_only:
            return output
        return replace(output, logprobs=output.logprobs * micro_batch.loss_mask[tree.kept][tree.rows])


@WithSharedPrefixes(
    "I1.combined-batches",
    "outputs that are scattered back to one of the sequences with a token",
    "(logprobs|entropy|values|scores) of a batch .*shared prefixes",
)
class EqualSequencesCountOnce(Sharing):
    """Only the first of the sequences with a token gets its log-prob."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output, tree = super().outputs(micro_batch, step), self.tree(micro_batch, step)
        if tree is None or output.logprobs is None:
            return output
        first = tree.kept[tree.rows] == torch.arange(len(tree.rows))
        return replace(output, logprobs=output.logprobs * first)


@Mutant(
    "I18.shared-aux",
    "a balance over the tokens that were computed",
    "the aux_loss in one micro-batch",
    family=MOE,
    declared=SHARED | {Capability.MOE, Capability.AUX_LOSS},
)
class BalanceOfComputedTokens(Sharing):
    """The routers' balance counts shared tokens once, each stretch of them for a sequence."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        tree = self.tree(micro_batch, step)
        if tree is None or "aux_loss" not in step.outputs:
            return super().outputs(micro_batch, step)
        with self.packed.routers.watch() as routings:
            output = super().outputs(micro_batch, step)
        return replace(output, aux_loss=balance_loss(routings, torch.tensor(tree.bounds)))
