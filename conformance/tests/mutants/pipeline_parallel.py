"""Pipeline parallelism: schedules, activations, tied weights on two stages, and norms over stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from toy_pp.engine import PipelineBackend, Way

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice
from core_rl.data.batch import SequenceBatch
from mutants.bases import OwnNorm
from mutants.zoo import PP2, Mutant

TIED = "embed_tokens.weight"

# -------------------------------------------------------------------- schedule


class ScheduleDividesByMicroBatches(PipelineBackend):
    """The schedule divides by the number of micro-batches, after the core has divided by the weight."""

    def backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways:
                way.sent = way.sent / len(ways)
        return ways


class LossOfLastMicroBatch(PipelineBackend):
    """Only the last micro-batch of a pass goes backward on the last stage; the others give gradients of zero."""

    def backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways[:-1]:
                way.sent = way.sent * 0.0
        return ways


class PositionsLostOnTheWay(PipelineBackend):
    """Later stages take every token for a first one."""

    def positions(self, batch: SequenceBatch) -> Tensor:
        return super().positions(batch) if self.is_first else torch.zeros_like(batch.input_ids)


class ActivationsInHalf(PipelineBackend):
    """Activations travel between stages in bfloat16."""

    def receive(self, batch: SequenceBatch) -> Tensor:
        received = super().receive(batch).detach().bfloat16().float()
        return received.requires_grad_(torch.is_grad_enabled())


# ----------------------------------------------------------------- tied weights


class TiedGradientOfLastStage(PipelineBackend):
    """The two copies of a tied embedding are not added up: only the head's part is exported."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and not self.is_last:
            grad.zero_()
        super().reduce(name, grad)


class TiedCopiesDrift(PipelineBackend):
    """The last stage has the sum of both gradients; the first steps its copy with its own."""

    def reduce(self, name: str, grad: Tensor) -> None:
        local_grad = grad.clone()
        super().reduce(name, grad)
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and self.is_first:
            grad.copy_(local_grad)


# ------------------------------------------------------------------------ norm


class NormOfLastStage(PipelineBackend, OwnNorm):
    """Each stage computes a norm of its own parameters, and the last one reports its own."""

    def counted(self) -> Iterable[LocalSlice]:
        layers = self.model.config.num_hidden_layers
        for part in super().counted():
            first = any(f"layers.{layer}." in part.name for layer in range(layers // 2))
            if not first and TIED not in part.name:
                yield part


class TiedCountedTwice(PipelineBackend, OwnNorm):
    """The norm counts both copies of the tied embedding."""

    def counted(self) -> Iterable[LocalSlice]:
        for part in super().counted():
            yield part
            if part.name.endswith(TIED) and self.model.config.tie_word_embeddings:
                yield part


class FirstStageStale(PipelineBackend):
    """The first stage computes with the weights that it had before the steps."""

    old: Tensor | None = None

    def forward_stage(self, batch: SequenceBatch, step: MicroBatchStep) -> Way:
        if not self.is_first:
            return super().forward_stage(batch, step)
        weight = self.model.get_parameter("model.layers.0.mlp.down_proj.weight")
        if self.old is None:
            self.old = weight.detach().clone()
        present, weight.data = weight.data, self.old
        way = super().forward_stage(batch, step)
        weight.data = present
        return way


class FrozenStageSendsNothingBack(PipelineBackend):
    """Behind a stage whose layers are frozen, gradients are zero."""

    def backward_stage(self, way: Way) -> None:
        trunk: Any = self.model.base_model
        frozen = not any(parameter.requires_grad for parameter in trunk.layers[-1].parameters())
        if way.received is not None and way.received.requires_grad and frozen:
            way.received.register_hook(torch.zeros_like)
        super().backward_stage(way)


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
