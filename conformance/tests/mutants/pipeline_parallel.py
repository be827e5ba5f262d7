"""Pipeline parallelism: schedules, activations, tied weights on two stages, and norms over stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from toy_pp.engine import PipelineEngine, Way

from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.state.grad_norm import GradShard
from mutants.zoo import PP2, Mutant

TIED = "embed_tokens.weight"

# -------------------------------------------------------------------- schedule


class ScheduleDividesByMicroBatches(PipelineEngine):
    """The schedule divides by the number of micro-batches, after the core has divided by the weight."""

    def _backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways:
                way.sent = way.sent / len(ways)
        return ways


class LossOfLastMicroBatch(PipelineEngine):
    """Only the last micro-batch of a pass goes backward on the last stage; the others give gradients of zero."""

    def _backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways[:-1]:
                way.sent = way.sent * 0.0
        return ways


class PositionsLostOnTheWay(PipelineEngine):
    """Later stages take every token for a first one."""

    def _positions(self, batch: SequenceBatch) -> Tensor:
        return super()._positions(batch) if self.is_first else torch.zeros_like(batch.input_ids)


class ActivationsInHalf(PipelineEngine):
    """Activations travel between stages in bfloat16."""

    def _receive(self, batch: SequenceBatch) -> Tensor:
        received = super()._receive(batch).detach().bfloat16().float()
        return received.requires_grad_(torch.is_grad_enabled())


# ----------------------------------------------------------------- tied weights


class TiedGradientOfLastStage(PipelineEngine):
    """The two copies of a tied embedding are not added up: what is exported is the head's part."""

    def _reduce(self, name: str, grad: Tensor) -> None:
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and not self.is_last:
            grad.zero_()
        super()._reduce(name, grad)


class TiedCopiesDrift(PipelineEngine):
    """The last stage has the sum of both gradients; the first steps its copy with its own."""

    def _reduce(self, name: str, grad: Tensor) -> None:
        own = grad.clone()
        super()._reduce(name, grad)
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and self.is_first:
            grad.copy_(own)


# ------------------------------------------------------------------------ norm


class NormOfLastStage(PipelineEngine):
    """Each stage computes a norm of what it holds, and the last one reports its own."""

    def _grad_shards(self) -> Iterable[GradShard]:
        layers = self.model.config.num_hidden_layers
        for shard in super()._grad_shards():
            first = any(f"layers.{layer}." in shard.name for layer in range(layers // 2))
            if not first and TIED not in shard.name:
                yield shard


class TiedCountedTwice(PipelineEngine):
    """Both copies of the tied embedding go into the norm."""

    def _grad_shards(self) -> Iterable[GradShard]:
        for shard in super()._grad_shards():
            yield shard
            if shard.name.endswith(TIED) and self.model.config.tie_word_embeddings:
                yield shard


class FirstStageStale(PipelineEngine):
    """The first stage computes with the weights that it had before the steps."""

    _old: Tensor | None = None

    def _forward_stage(self, batch: SequenceBatch, step: MicroBatchStep) -> Way:
        if not self.is_first:
            return super()._forward_stage(batch, step)
        weight = self.model.get_parameter("model.layers.0.mlp.down_proj.weight")
        if self._old is None:
            self._old = weight.detach().clone()
        present, weight.data = weight.data, self._old
        way = super()._forward_stage(batch, step)
        weight.data = present
        return way


class FrozenStageSendsNothingBack(PipelineEngine):
    """Behind a stage whose layers are frozen, gradients are zero."""

    def _backward_stage(self, way: Way) -> None:
        trunk: Any = self.model.base_model
        frozen = not any(parameter.requires_grad for parameter in trunk.layers[-1].parameters())
        if way.received is not None and way.received.requires_grad and frozen:
            way.received.register_hook(torch.zeros_like)
        super()._backward_stage(way)


MUTANTS = (
    Mutant(
        engine=FrozenStageSendsNothingBack,
        killed_by="I20.frozen-parts",
        issue="stages without trained parameters",
        says=r"gradients with \d+ of \d+ parameters frozen \(model.layers.1",
        layout=PP2,
    ),
    Mutant(
        engine=ScheduleDividesByMicroBatches,
        killed_by="I1.micro-batches",
        issue="AReaL #1273",
        says="gradients with",
        layout=PP2,
    ),
    Mutant(
        engine=LossOfLastMicroBatch,
        killed_by="I1.micro-batches",
        issue="a pipeline that is flushed too early",
        says="gradients with",
        layout=PP2,
    ),
    Mutant(
        engine=PositionsLostOnTheWay,
        killed_by="I7.logprobs",
        issue="OpenRLHF #217, on later stages",
        says="logprobs at temperature 1",
        layout=PP2,
    ),
    Mutant(
        engine=ActivationsInHalf,
        killed_by="I7.logprobs",
        issue="accelerate #3979, between stages",
        says="logprobs at temperature 1",
        layout=PP2,
    ),
    Mutant(
        engine=TiedGradientOfLastStage,
        killed_by="I10.tied-gradient",
        issue="Megatron-LM, embedding gradients over the first and the last stage",
        says="embed_tokens",
        layout=PP2,
        family="qwen3",
    ),
    Mutant(
        engine=TiedCopiesDrift,
        killed_by="I10.tied-after-steps",
        issue="verl #6334, over stages",
        says="after steps",
        layout=PP2,
        family="qwen3",
    ),
    Mutant(
        engine=NormOfLastStage,
        killed_by="I4.grad-norm",
        issue="torchtitan #649",
        says="the norm",
        layout=PP2,
    ),
    Mutant(
        engine=TiedCountedTwice,
        killed_by="I4.grad-norm",
        issue="AReaL #1497, for the two copies of a tied embedding",
        says="the norm",
        layout=PP2,
        family="qwen3",
    ),
    Mutant(
        engine=FirstStageStale,
        killed_by="I3.gradients-after-steps",
        issue="PipeDream's stale weights (arXiv:1806.03377), where none are meant",
        says="after 2 steps",
        layout=PP2,
    ),
)
