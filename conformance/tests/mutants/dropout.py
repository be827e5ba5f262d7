"""Dropout that acts at the wrong time, in the wrong place, or with masks that are not its own.

Each fault is a part that leaves the rest to its base, so that all of them can be put together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from mutants.bases import Packed, Replicated, TrainContext
from mutants.zoo import DP2, Mutant


class _Remembers(Packed):
    """A correct engine that remembers steps and loads."""

    stepped = loaded = False

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        self.stepped = True

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        self.loaded = True


@Mutant(
    "I9.dropout-masks",
    "verl #4708: log-probs in training mode",
    r"forward\(\) after an optimizer step differ: dropout is on in evaluation",
)
class StaysOnAfterAStep(_Remembers):
    """Evaluation runs in training mode from the first step on."""

    def set_training(self, training: bool) -> None:
        super().set_training(training or self.stepped)


@Mutant(
    "I9.dropout-masks",
    "a load that calls train()",
    r"forward\(\) after a load\(\) differ: dropout is on in evaluation",
)
class StaysOnAfterALoad(_Remembers):
    """Evaluation runs in training mode from the first load on."""

    def set_training(self, training: bool) -> None:
        super().set_training(training or self.loaded)


@Mutant(
    "I9.dropout-masks",
    "a mode that is not restored",
    "in training after an optimizer step .* it is off in training",
)
class OffAfterAStep(_Remembers):
    """Training runs in evaluation mode from the first step on."""

    def set_training(self, training: bool) -> None:
        super().set_training(training and not self.stepped)


@Mutant(
    "I9.dropout-masks",
    "from_pretrained ends in eval()",
    r"in training after a load\(\).* it is off in training",
)
class OffAfterALoad(_Remembers):
    """Training runs in evaluation mode from the first load on."""

    def set_training(self, training: bool) -> None:
        super().set_training(training and not self.loaded)


@Mutant(
    "I9.dropout-masks",
    "recomputation with preserve_rng_state=False",
    "gradients with the masks of the forward pass",
)
class RecomputesOtherMasks(Packed):
    """Layers are computed again in the backward pass, without the random state that they had."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


class _WithoutScale(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.scaled_dot_product_attention:
            result = result * (1.0 - (kwargs or {}).get("dropout_p", 0.0))
        return result


@Mutant("I9.dropout-masks", "an attention kernel of its own", r"not multiplied by 1 / \(1 - rate\) = 1.333")
class NotScaled(Packed):
    """Attention weights that dropout keeps are not divided by ``1 - p``."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        with _WithoutScale():
            super().run(micro_batches, step, mode)


@Mutant(
    "I9.dropout-masks",
    "Megatron's tracker, seeded alike on all data-parallel ranks",
    "the masks on data-parallel rank 1 are those on rank 0",
    layout=DP2,
)
class OneSeedForAllRanks(Packed):
    """Every pass of every rank begins at the same random state, counted up from the seed."""

    passes = 0

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self.passes += 1
        torch.manual_seed((1000 * self.context.seed + self.passes) % 2**63)
        super().run(micro_batches, step, mode)


@Mutant(
    "I9.dropout-masks",
    "a seed that is set before each pass",
    "the masks are again those in the first training pass",
)
class OneSeedForAllPasses(Packed):
    """Every pass of a rank begins at the same random state."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        torch.manual_seed(self.context.world.rank)
        super().run(micro_batches, step, mode)


@Mutant(
    "I9.dropout-masks",
    "a seed that a load sets again",
    r"in training after a load\(\): the masks are again those in the first training pass",
)
class FirstMasksAfterALoad(Packed):
    """The first pass, and the first after each load, begin at the random state of the seed."""

    fresh = True

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if self.fresh and mode != "forward":
            torch.manual_seed(self.context.world.rank)
            self.fresh = False
        super().run(micro_batches, step, mode)

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        self.fresh = True


@Mutant("I9.dropout-off", "a critic that is never in evaluation", r"values by forward\(\)")
class CriticStaysInTraining(Replicated):
    """A model with a scalar head is always in training mode."""

    def set_training(self, training: bool) -> None:
        super().set_training(training or self.context.config.model.head != "lm")


@Mutant(
    "I9.dropout-masks",
    "a config that one layer reads",
    r"dropout is off in layers \[1\], and on in the others",
)
class InTheFirstLayer(Packed):
    """Only the first layer has it."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        for layer in _attention(model)[1:]:
            layer.attention_dropout = 0.0


@Mutant(
    "I9.dropout-places",
    "a module that reads one rate of three",
    "with embd_pdrop = 0.25, a number at the embedding is never dropped",
    family="gpt2",
)
class AttentionAlone(Packed):
    """Neither GPT-2's embedding nor its residual stream has it."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        _set_rates(model, r"\.drop$|resid_dropout|mlp\.dropout", 0.0)


@Mutant(
    "I9.dropout-places",
    "a rate by default",
    "with embd_pdrop = 0.25, a number at the embedding is dropped on data-parallel rank 0",
    family="gpt2",
)
class EmbeddingAtAnotherRate(Packed):
    """The embedding has half of the config's rate."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        _set_rates(model, r"\.drop$", 0.5)


@Mutant(
    "I9.dropout-places",
    "a feed-forward layer without dropout",
    "with resid_pdrop = 0.25, a number at the residual is dropped on data-parallel rank 0",
    family="gpt2",
)
class NotAfterTheFeedForward(Packed):
    """The residual stream has it after attention alone."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        _set_rates(model, r"mlp\.dropout", 0.0)


def _set_rates(model: PreTrainedModel, pattern: str, factor: float) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and re.search(pattern, name):
            module.p *= factor


@Mutant(
    "I9.dropout-masks",
    "eval() at the end of a micro-batch",
    "all in micro-batches after the first: dropout is off there",
)
class InTheFirstMicroBatch(Packed):
    """Only the first micro-batch of a pass has it."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        training = self.model.training
        for micro_batch in micro_batches:
            super().run([micro_batch], step, mode)
            self.model.eval()
        self.model.train(training)


@Mutant("I9.dropout-masks", "a rate by default", "those of no mask at rate 0.25")
class AtAnotherRate(Packed):
    """The rate is half of the config's."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        for layer in _attention(model):
            layer.attention_dropout /= 2


@Mutant(
    "I9.adapter-dropout-masks",
    "a rate by default, of the adapter",
    "gradients of one token on data-parallel rank 0|an input of the adapter is dropped",
)
class AdapterAtAnotherRate(Packed):
    """The adapter has a rate of its own."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        for dropout in _dropout_of_adapter(model):
            dropout.p = 0.1


@Mutant(
    "I9.adapter-dropout-masks", "a mask without its scale", "gradients of one token on data-parallel rank 0"
)
class AdapterNotScaled(Packed):
    """Inputs of the adapter that are kept are not divided by ``1 - p``."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        for dropout in _dropout_of_adapter(model):
            dropout.register_forward_hook(_unscaled)


@Mutant("I9.adapter-dropout-masks", "a mask for each micro-batch", "are dropped at all 40 tokens")
class AdapterHasOneMaskForAllTokens(Packed):
    """The same inputs of the adapter are dropped at all tokens of a micro-batch."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        for dropout in _dropout_of_adapter(model):
            dropout.register_forward_hook(_one_mask)


def _one_mask(module: nn.Dropout, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return args[0] * module(torch.ones_like(args[0][..., :1, :])) if args[0].shape[-2] > 1 else output


@Mutant(
    "I9.dropout-places", "transformers' classifier_dropout", "inputs of the (value|reward) head are dropped"
)
class ScalarHeadHasDropout(Packed):
    """In training, inputs of a scalar head are dropped at the rate of attention."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.head != "lm":
            self.model.base_model.register_forward_hook(self._drop)

    def _drop(self, module: nn.Module, args: Any, output: Any) -> None:
        rate = getattr(self.model.config, "attn_pdrop", 0.0) or getattr(
            self.model.config, "attention_dropout", 0.0
        )
        hidden = output.last_hidden_state
        output.last_hidden_state = nn.functional.dropout(hidden, rate, self.model.training)


def _dropout_of_adapter(model: nn.Module) -> list[nn.Dropout]:
    return [m for name, m in model.named_modules() if ".lora_dropout." in name and isinstance(m, nn.Dropout)]


def _unscaled(module: nn.Dropout, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1.0 - module.p) if module.training else output


def _attention(model: PreTrainedModel) -> list[Any]:
    """The attention layers of a llama."""
    return [module for module in model.modules() if hasattr(module, "attention_dropout")]


@Mutant(
    "I9.dropout-masks", "an attention kernel for long passes", "with long sequences.* it is off in training"
)
class OffInLongPasses(Packed):
    """Micro-batches with a sequence above 32 tokens run in evaluation mode."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        training = self.model.training
        for part in micro_batches:
            self.model.train(training and part.max_length <= 32)
            super().run([part], step, mode)
        self.model.train(training)


class _LongPasses(Packed):
    """Dropout of passes with a sequence of more than 16 tokens is 1.5 times the config's."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            factor = 1.5 if part.max_length > 16 else 1.0
            self.scale(factor)
            super().run([part], step, mode)
            self.scale(1 / factor)

    def scale(self, factor: float) -> None:
        """Multiply the rates."""
        raise NotImplementedError


@Mutant("I9.dropout-masks", "a rate by length", "are those of no mask at rate")
class DropsMoreOfLongPasses(_LongPasses):
    """So is that of attention."""

    def scale(self, factor: float) -> None:
        modules: list[Any] = [*self.model.modules()]
        for module in modules:
            if hasattr(module, "attention_dropout"):
                module.attention_dropout *= factor


@Mutant("I9.adapter-dropout-masks", "a rate by length", "in a sequence of 40")
class AdapterDropsMoreOfLongPasses(_LongPasses):
    """So is that of an adapter."""

    def scale(self, factor: float) -> None:
        for dropout in _dropout_of_adapter(self.model):
            dropout.p *= factor


@Mutant("I9.dropout-masks", "a seed without effect", "the masks are again those in the first training pass")
class DropoutIgnoresSeed(Packed):
    """Masks are drawn from the number of the pass, whatever the seed is."""

    passes = 0

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self.passes += mode != "forward"
        torch.manual_seed(1000 * self.context.world.rank + self.passes)
        super().run(micro_batches, step, mode)


@Mutant("I9.dropout-masks", "a seed from the clock", "the first masks are others than in the first")
class DropoutDrawsFromClock(Packed):
    """One seed gives other masks each time."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        torch.seed()
        super().run(micro_batches, step, mode)
