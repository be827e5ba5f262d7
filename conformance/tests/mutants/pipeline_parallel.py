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


@Mutant("I1.micro-batches", "AReaL #1273", "gradients with", layout=PP2)
class ScheduleDividesByMicroBatches(PipelineBackend):
    """The schedule divides by the number of micro-batches, after the core has divided by the weight."""

    def backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways:
                way.sent = way.sent / len(ways)
        return ways


@Mutant("I1.micro-batches", "a pipeline that is flushed too early", "gradients with", layout=PP2)
class LossOfLastMicroBatch(PipelineBackend):
    """Only the last micro-batch of a pass goes backward on the last stage; the others give gradients of zero."""

    def backward_order(self, ways: list[Way]) -> list[Way]:
        if self.is_last:
            for way in ways[:-1]:
                way.sent = way.sent * 0.0
        return ways


@Mutant("I7.logprobs", "OpenRLHF #217, on later stages", "logprobs at temperature 1", layout=PP2)
class PositionsLostOnTheWay(PipelineBackend):
    """Later stages take every token for a first one."""

    def positions(self, batch: SequenceBatch) -> Tensor:
        return super().positions(batch) if self.is_first else torch.zeros_like(batch.input_ids)


@Mutant("I7.logprobs", "accelerate #3979, between stages", "logprobs at temperature 1", layout=PP2)
class ActivationsInHalf(PipelineBackend):
    """Activations travel between stages in bfloat16."""

    def receive(self, batch: SequenceBatch) -> Tensor:
        received = super().receive(batch).detach().bfloat16().float()
        return received.requires_grad_(torch.is_grad_enabled())


# ----------------------------------------------------------------- tied weights


@Mutant(
    "I1.gradients",
    "Megatron-LM, embedding gradients over the first and the last stage",
    "tied embedding's use at the head alone",
    layout=PP2,
    family="qwen3",
)
class TiedGradientOfLastStage(PipelineBackend):
    """The two copies of a tied embedding are not added up: only the head's part is exported."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and not self.is_last:
            grad.zero_()
        super().reduce(name, grad)


@Mutant("I10.tied-after-steps", "verl #6334, over stages", "after steps", layout=PP2, family="qwen3")
class TiedCopiesDrift(PipelineBackend):
    """The last stage has the sum of both gradients; the first steps its copy with its own."""

    def reduce(self, name: str, grad: Tensor) -> None:
        local_grad = grad.clone()
        super().reduce(name, grad)
        if name.endswith(TIED) and self.model.config.tie_word_embeddings and self.is_first:
            grad.copy_(local_grad)


# ------------------------------------------------------------------------ norm


@Mutant("I4.grad-norm", "torchtitan #649", "the norm", layout=PP2)
class NormOfLastStage(PipelineBackend, OwnNorm):
    """Each stage computes a norm of its own parameters, and the last one reports its own."""

    def counted(self) -> Iterable[LocalSlice]:
        layers = self.model.config.num_hidden_layers
        for part in super().counted():
            first = any(f"layers.{layer}." in part.name for layer in range(layers // 2))
            if not first and TIED not in part.name:
                yield part


@Mutant(
    "I4.grad-norm",
    "AReaL #1497, for the two copies of a tied embedding",
    "the norm",
    layout=PP2,
    family="qwen3",
)
class TiedCountedTwice(PipelineBackend, OwnNorm):
    """The norm counts both copies of the tied embedding."""

    def counted(self) -> Iterable[LocalSlice]:
        for part in super().counted():
            yield part
            if part.name.endswith(TIED) and self.model.config.tie_word_embeddings:
                yield part


@Mutant(
    "I3.gradients-after-steps",
    "PipeDream's stale weights (arXiv:1806.03377), where none are meant",
    "after 2 steps",
    layout=PP2,
)
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


@Mutant(
    "I20.frozen-parts",
    "stages without trained parameters",
    r"gradients with \d+ of \d+ parameters frozen \(model.layers.1",
    layout=PP2,
)
class FrozenStageSendsNothingBack(PipelineBackend):
    """Behind a stage whose layers are frozen, gradients are zero."""

    def backward_stage(self, way: Way) -> None:
        trunk: Any = self.model.base_model
        frozen = not any(parameter.requires_grad for parameter in trunk.layers[-1].parameters())
        if way.received is not None and way.received.requires_grad and frozen:
            way.received.register_hook(torch.zeros_like)
        super().backward_stage(way)
