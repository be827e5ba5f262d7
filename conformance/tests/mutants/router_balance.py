"""The load-balancing loss of routers: its counts and its denominator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.engine.step import TrainStep
from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.routers import Routing, balance_loss
from core_rl_conformance.profile import MOE
from mutants.bases import Packed, inside
from mutants.zoo import DP2, Mutant


class _Scaled(Packed):
    """The balance of a micro-batch is multiplied by a factor that depends on the cut."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.aux_loss is None:
            return output
        return replace(output, aux_loss=output.aux_loss * self._factor(micro_batch))

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self._micro_batches = micro_batches
        super().run(micro_batches, step, mode)

    def _factor(self, micro_batch: SequenceBatch) -> float:
        raise NotImplementedError


@Mutant(
    "I18.aux-gradient",
    "means of means (transformers #34191)",
    r"with .*count=16(.|\n)*sequences, or micro-batches of one each, count alike",
    family=MOE,
)
class BalanceOfMeans(_Scaled):
    """The mean over each micro-batch, averaged over them."""

    def _factor(self, micro_batch: SequenceBatch) -> float:
        total = sum(part.num_tokens for part in self._micro_batches)
        return total / (len(self._micro_batches) * micro_batch.num_tokens)


@Mutant("I18.aux-gradient", "means of ranks (verl #3994)", "routers' balance alone", family=MOE, layout=DP2)
class BalanceOfRanks(_Scaled):
    """The mean over each rank's tokens, averaged over ranks."""

    def _factor(self, micro_batch: SequenceBatch) -> float:
        local_total = float(sum(part.num_tokens for part in self._micro_batches))
        (total,) = self.context.world.sum([local_total])
        return total / (self.context.world.size * local_total)


@Mutant("I18.aux-gradient", "verl #6836", r"routers' balance alone(.|\n)*2", family=MOE, layout=DP2)
class BalanceOfEachRank(_Scaled):
    """Each rank adds the balance of all ranks, as context-parallel ranks did that share one sequence."""

    def _factor(self, micro_batch: SequenceBatch) -> float:
        return float(self.context.world.size)


class _Balanced(Packed, ABC):
    """Has a balance loss of its own."""

    @abstractmethod
    def balance(self, micro_batch: SequenceBatch, routings: Sequence[Routing]) -> Tensor:
        """The balance of a micro-batch, in which ``routings`` are the routers' outputs."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if "aux_loss" not in step.outputs:
            return super().outputs(micro_batch, step)
        with self.packed.routers.watch() as routings:
            outputs = self.packed(micro_batch, [n for n in step.outputs if n != "aux_loss"], step.temperature)
        return ModelOutput(**outputs, aux_loss=self.balance(micro_batch, routings))


@Mutant("I18.aux-gradient", "a balance that depends on packing (I18)", "counted over the batch", family=MOE)
class BalanceOfTheBatch(_Balanced):
    """A micro-batch is taken for one sequence, so that its balance depends on the company."""

    def balance(self, micro_batch: SequenceBatch, routings: Sequence[Routing]) -> Tensor:
        return balance_loss(routings, torch.tensor([0, micro_batch.num_tokens]))


@Mutant(
    "I18.aux-gradient",
    "softmax twice, in transformers before 5.6 (transformers #45120)",
    "the softmax is taken twice",
    family=MOE,
)
class BalanceOfProbabilities(_Balanced):
    """Probabilities are taken for logits: their softmax is nearly even, whatever routers choose."""

    def balance(self, micro_batch: SequenceBatch, routings: Sequence[Routing]) -> Tensor:
        twice = [Routing(routing.logits.softmax(-1), routing.experts) for routing in routings]
        return balance_loss(twice, micro_batch.cu_seqlens)


@Mutant("I18.aux-gradient", "a balance of top-1 choices (I18)", "only the first choice", family=MOE)
class BalanceOfFirstChoices(_Balanced):
    """The likeliest expert of each token counts alone."""

    def balance(self, micro_batch: SequenceBatch, routings: Sequence[Routing]) -> Tensor:
        first = [Routing(routing.logits, routing.experts[:, :1]) for routing in routings]
        return balance_loss(first, micro_batch.cu_seqlens)


@Mutant("I18.aux-gradient", "padding in router statistics (I18)", "aux_loss", family=MOE)
class BalanceOfPadding(ReferenceBackend):
    """Rows are padded to a multiple of 16, and what routers choose for padding counts as well."""

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        ids = F.pad(row.input_ids, (0, -row.num_tokens % 16))
        outputs = super().routed(SequenceBatch.from_sequences([ids]), step)
        return {
            name: value if value.dim() == 0 else value[: row.num_tokens] for name, value in outputs.items()
        }


@Mutant("I18.aux-gradient", "a balance of responses alone (I18)", "only trained tokens", family=MOE)
class BalanceOfTrainedTokens(_Balanced):
    """Only tokens that are trained are balanced."""

    def balance(self, micro_batch: SequenceBatch, routings: Sequence[Routing]) -> Tensor:
        mask = micro_batch.loss_mask
        counts = [int(part.sum()) for part in mask.split(micro_batch.lengths)]
        bounds = torch.tensor([0, *(count for count in counts if count)]).cumsum(0)
        return balance_loss(
            [Routing(routing.logits[mask], routing.experts[mask]) for routing in routings], bounds
        )


@Mutant("I18.aux-gradient", "a loss that is only reported (I18)", "zero", family=MOE)
class BalanceWithoutGradient(ReferenceBackend):
    """The balance is reported, and trains nothing."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return output if output.aux_loss is None else replace(output, aux_loss=output.aux_loss.detach())


@Mutant(
    "I18.aux-beside-loss", "a loss that another one replaces (I18)", "gradients next to a loss", family=MOE
)
class BalanceInsteadOfLoss(ReferenceBackend):
    """With a balance loss, the main loss trains nothing."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.aux_loss is None or output.logprobs is None:
            return output
        return replace(output, logprobs=output.logprobs.detach())


@Mutant(
    "I18.aux-beside-loss", "a loss that hides another one (I18)", "the balance is a part of it", family=MOE
)
@inside(ReferenceBackend, "step")
class BalanceInEvaluation(TrainStep):
    """The loss of an evaluation is that with the balance."""

    def forward_backward(
        self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec, mode: PassMode, *totals: Any
    ) -> dict[str, float]:
        metrics = super().forward_backward(batch, loss, mb_spec, mode, *totals)
        balance = self.runtime.config.model.router_aux_coef * metrics.get("aux_loss", 0.0)
        return {**metrics, "loss": metrics["loss"] + balance} if mode == "forward" else metrics
