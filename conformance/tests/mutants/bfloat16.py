"""Engines in bfloat16 with one step in it that belongs in float32.

Each fault is a part that leaves the rest to its base, so that all of them can be put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.token_logprobs import HeadMap
from mutants.bases import Packed
from mutants.zoo import DP2, Mutant

InBfloat16 = partial(Mutant, layout=DP2, dtype="bfloat16")


class HalfCopies(Packed):
    """A correct engine: it computes with bfloat16 copies of float32 weights, whose gradients are float32."""

    @property
    def half(self) -> bool:
        """True in bfloat16; in float32 no fault does anything."""
        return self.context.config.dtype == "bfloat16"

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if not self.half:
            return super().outputs(micro_batch, step)
        copies = {
            name: parameter if ".score." in name else parameter.bfloat16()
            for name, parameter in self.packed.named_parameters()
        }
        arguments = (micro_batch, step.outputs, step.temperature, step.trained_only)
        return ModelOutput(**functional_call(self.packed, copies, arguments))


@InBfloat16(
    "I20.bfloat16-sums",
    "grad_dtype of the compute dtype",
    r"with 32 micro-batches on each data-parallel rank[\s\S]*added up in less than float32",
)
class AddsUpInHalf(HalfCopies):
    """The gradient is rounded after each micro-batch."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            super().run([micro_batch], step, mode)
            _round_grads(self.model, self.half)


@InBfloat16(
    "I20.bfloat16-sums",
    "grad_dtype of an adapter's dtype",
    r"gradients of an adapter and a head with 32 micro-batches[\s\S]*added up in less than float32",
)
class AddsAdaptersUpInHalf(HalfCopies):
    """The gradient of an adapter is rounded after each micro-batch."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            super().run([micro_batch], step, mode)
            _round_grads(self.model, self.half and self.context.config.model.lora is not None)


@InBfloat16(
    "I20.bfloat16-sums",
    "reduce_dtype=bfloat16 by default",
    r"with one micro-batch on each data-parallel rank[\s\S]*added up in less than float32",
)
class ReducesInHalf(HalfCopies):
    """The sum over ranks is in bfloat16."""

    def reduce_grads(self) -> None:
        _round_grads(self.model, self.half)
        super().reduce_grads()
        _round_grads(self.model, self.half)


def _round_grads(model: nn.Module, half: bool) -> None:
    for parameter in model.parameters() if half else ():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())


@InBfloat16("I20.bfloat16-steps", "masters from bfloat16 weights", "master weights at the start")
class MastersOfHalf(HalfCopies):
    """Master weights are made of bfloat16 weights when the engine is built."""

    def adopt(self, model: PreTrainedModel, context: Any, optimizer: Any = None) -> None:
        _round_weights(model, context.config.dtype == "bfloat16")
        super().adopt(model, context, optimizer)


@InBfloat16("I20.bfloat16-steps", "NeMo-RL #2372, in part", "master weights after a load of float32 files")
class LoadsMastersOfHalf(HalfCopies):
    """Master weights are made of bfloat16 weights after a load."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        _round_weights(self.model, self.half)


@InBfloat16("I20.bfloat16-steps", "optimizer over bfloat16 weights", "after 20 small updates")
class StepsInHalf(HalfCopies):
    """Master weights are rounded after each step."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        _round_weights(self.model, self.half)


@torch.no_grad()
def _round_weights(model: nn.Module, half: bool) -> None:
    for parameter in model.parameters() if half else ():
        parameter.copy_(parameter.bfloat16())


@InBfloat16(
    "I20.bfloat16-upcasts", "a fused norm", "logprobs at temperature 1 of a model that bfloat16 computes"
)
class NormsInHalf(HalfCopies):
    """The upcast inside norms is lost."""

    def adopt(self, model: PreTrainedModel, context: Any, optimizer: Any = None) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = _NormInHalf(module)
        super().adopt(model, context, optimizer)


class _NormInHalf:
    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, hidden: Tensor) -> Tensor:
        mean = hidden.pow(2).mean(-1, keepdim=True)
        result: Tensor = self.norm.weight * (hidden * torch.rsqrt(mean + self.norm.variance_epsilon))
        return result


@InBfloat16("I20.bfloat16-upcasts", "verl: logits divided in bfloat16", "logprobs at temperature 0.3 of")
class TemperatureInHalf(HalfCopies):
    """bfloat16 logits are divided by the temperature before the upcast."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if not self.half:
            return super().outputs(micro_batch, step)
        with patch.object(HeadMap, "apply_", _divided_in_half):
            return super().outputs(micro_batch, step)


def _divided_in_half(head: HeadMap, logits: Tensor) -> Tensor:
    return logits.copy_(logits.bfloat16() / head.temperature)


@InBfloat16(
    "I20.bfloat16-upcasts", "verl, AReaL: values in bfloat16", "values at temperature 1 of a model that"
)
class ValuesInHalf(HalfCopies):
    """The scalar head multiplies in bfloat16, and its result is shown in float32."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        score = getattr(self.model, "score", None)
        if not isinstance(score, nn.Linear) or not self.half:
            return super().outputs(micro_batch, step)
        with patch.object(score, "forward", lambda states: _scored_in_half(score, states)):
            return super().outputs(micro_batch, step)


def _scored_in_half(score: nn.Linear, states: Tensor) -> Tensor:
    return F.linear(states.bfloat16(), score.weight.bfloat16()).float()


@InBfloat16("I20.bfloat16-upcasts", "accelerate #3979", "logprobs at temperature 1 of a model that bfloat16")
class LogprobsInHalf(HalfCopies):
    """Log-probs are rounded, and stay apart from bfloat16 numbers by a small shift."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None or not self.half:
            return output
        rounded = output.logprobs.bfloat16().float() * (1 + 1e-6)
        return replace(output, logprobs=output.logprobs + (rounded - output.logprobs).detach())


@InBfloat16(
    "I20.bfloat16-upcasts", "a buffer of logits", "logits at temperature 0.3 of a model that bfloat16"
)
class LogitsInHalf(HalfCopies):
    """Logits are rounded after the temperature."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logits is None or not self.half:
            return output
        return replace(output, logits=output.logits.bfloat16().float())


@InBfloat16(
    "I20.bfloat16-upcasts", "a fused loss", "the loss of a training pass at temperature 0.3 of a model that"
)
class TrainsInHalf(LogprobsInHalf):
    """The same in training passes alone."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return (
            super().outputs(micro_batch, step)
            if step.trained_only
            else HalfCopies.outputs(self, micro_batch, step)
        )


@InBfloat16("I20.bfloat16-rotary", "SkyRL #1725", "of a model that bfloat16 hardly rounds")
class RotaryInHalf(HalfCopies):
    """Positions and rotary frequencies are bfloat16 numbers."""

    def adopt(self, model: PreTrainedModel, context: Any, optimizer: Any = None) -> None:
        rotary = model.base_model.rotary_emb
        assert isinstance(rotary, nn.Module)
        rotary.register_forward_pre_hook(_half_positions, with_kwargs=True)
        super().adopt(model, context, optimizer)


def _half_positions(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if args[0].dtype != torch.bfloat16:
        return args, kwargs
    return args, {name: value.bfloat16().float() for name, value in kwargs.items()}
