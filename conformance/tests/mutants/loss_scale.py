"""Loss scale, accumulation and what gradients are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnNorm, Packed, Replicated
from mutants.zoo import DP2, Mutant


@Mutant("I1.micro-batches", "transformers #34191", "micro-batches")
class MeanOfMeans(ReferenceBackend):
    """Each micro-batch weighs the same, however many tokens it trains."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        total = sum(int(part.loss_mask.sum()) for part in micro_batches)
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward":
                (loss * total / (len(micro_batches) * max(1, int(part.loss_mask.sum())))).backward()


@Mutant("I1.micro-batches", "AReaL #1273", r"multiplied by 0\.5")
class DividesByMicroBatches(ReferenceBackend):
    """The schedule divides by the number of micro-batches; the core has already divided by the weight."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward":
                (loss / len(micro_batches)).backward()


@Mutant("I1.micro-batches", "accumulation", "gradients with 2")
class LastMicroBatchOnly(ReferenceBackend):
    """Gradients are overwritten, not accumulated."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            if mode != "forward":
                self.zero_grad()
            super().run([part], step, mode)


@Mutant("I5.two-calls", "torchtitan #3575", "of 2 calls")
class ZeroGradInForwardBackward(ReferenceBackend):
    """Each call of forward_backward begins by dropping the previous call's gradients."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode != "forward":
            self.zero_grad()
        super().run(micro_batches, step, mode)


@Mutant("I1.training", "accumulation", "the norm of step 1")
class NeverZeroesGradients(ReferenceBackend):
    """Gradients of one step are still there in the next."""

    def zero_grad(self) -> None:
        pass


@Mutant("I5.eval-leaves-nothing", "NeMo-RL #1012", "evaluations")
class BackwardInEvaluation(ReferenceBackend):
    """Evaluation records a graph, runs backward, and leaves gradients."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            with torch.enable_grad():
                output = self.outputs(part, step)
                loss = step(output, part)
                if mode != "forward":
                    loss.backward()
                elif output.logprobs is not None:
                    output.logprobs.sum().backward()


@Mutant("I6.masked-tokens", "verl #2543", "untrained tokens")
class TrainsThePrompt(ReferenceBackend):
    """Tokens that the loss mask leaves out are trained a little as well."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            output = self.outputs(part, step)
            loss = step(output, part)
            if mode != "forward":
                if "advantages" in part and output.logprobs is not None:
                    prompt = torch.where(part.loss_mask, 0.0, part["advantages"] * output.logprobs)
                    loss = loss - 1e-4 * prompt.sum()
                loss.backward()


@Mutant("I6.masked-nan", "SkyRL #1635", "all zero|NaN")
class DropsMicroBatchesWithNan(ReferenceBackend):
    """A guard against NaN drops whole micro-batches, although nothing reads the NaN."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward" and not any(value.isnan().any() for value in part.tokens.values()):
                loss.backward()


@Mutant("I1.gradients", "verl #6334", "tied embedding's use at the input alone", family="qwen3")
class DetachesTheHead(ReferenceBackend):
    """The tied embedding gets the gradient of its use at the input only."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head != "lm":
            return super().sequence(ids, step)
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        return self.language_model(ids, hidden @ head.weight.detach().T / step.temperature, step)


@Mutant("I1.combined-batches", "verl #6913", "score.weight")
class UntrainedValueHead(ReferenceBackend):
    """The scalar head is used, and gets no gradient."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head == "lm":
            return super().sequence(ids, step)
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        states = (hidden.float() @ self.model.get_parameter("score.weight").detach().T)[:, 0]
        zero = states.new_zeros(1)
        if self.context.config.model.head == "reward":
            return {"scores": states[-1:]}
        return {"values": torch.cat([zero, states[:-1]]), "bootstrap": states[-1:]}


@Mutant("I1.combined-batches", "verl #6957", "gradients of a batch with head")
class RewardDividedByTokens(ReferenceBackend):
    """The gradient of a loss over sequences is divided by their tokens."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward":
                (loss * part.num_sequences / part.num_tokens).backward()


@Mutant("I4.grad-norm", "torchtitan #649", "norm")
class NormOfSomeShards(OwnNorm):
    """The norm leaves out vectors, as if another rank would count them."""

    def counted(self) -> Iterable[LocalSlice]:
        return [part for part in super().counted() if part.tensor.dim() > 1]


@Mutant("I4.grad-norm", "AReaL #1497", r"1\.41421", layout=DP2)
class NormCountsReplicas(OwnNorm):
    """Each rank counts what all of them have."""

    def counted(self) -> Iterable[LocalSlice]:
        return [replace(part, replica=0) for part in super().counted()]


@Mutant("I2.data-parallel", "torchtitan #2206", r"multiplied by 0\.5", layout=DP2)
class AveragesOverRanks(Replicated):
    """The wrapper averages gradients over ranks; the core wants their sum."""

    def reduce_grads(self) -> None:
        super().reduce_grads()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.context.world.size


@Mutant("I2.data-parallel", "verl #3994", "rank 0", layout=DP2)
class LocalDenominator(Replicated):
    """Each rank's loss is divided by its own tokens, and then averaged."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        local_total = float(sum(int(part.loss_mask.sum()) for part in micro_batches))
        (total,) = self.context.world.sum([local_total])
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward":
                (loss * total / (self.context.world.size * max(1.0, local_total))).backward()


@Mutant("I5.two-calls", "verl #6957", "of 2 calls", layout=DP2)
class ReducesInEachCall(Replicated):
    """Gradients are reduced after each call, so that the first call's are added up twice."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches, step, mode)
        if mode != "forward":
            super().reduce_grads()

    def reduce_grads(self) -> None:
        pass


@Mutant("I1.combined-batches", "verl #5591", "(?i)time|answer", timeout_s=8.0, layout=DP2)
class EmptyRankStaysAway(Replicated):
    """A rank without work leaves out a collective that the others wait in."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches, step, mode)
        if any(part.loss_mask.any() for part in micro_batches):
            self.context.world.barrier()


@Mutant("I1.gradients", "verl #4710", "gradients of TokenMean")
class DoubledGradient(Packed):
    """Gradients of log-probs in the packed kernel are doubled: a scale that a benchmark would not show."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None or not output.logprobs.requires_grad:
            return output
        doubled = 2 * output.logprobs - output.logprobs.detach()
        return ModelOutput(**{**dict(output.items()), "logprobs": doubled})
