"""Faults that begin at a size, or with a constant, that tiny models do not have.

Each fault is a part that leaves the rest to its base, so that all of them can be put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.hf_backend import HFBackend
from mutants.bases import Packed, TrainContext
from mutants.zoo import Mutant


class _Adopts(Packed):
    """The model is changed after it was built."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        self.change(model)
        super().adopt(model, context, optimizer)

    def change(self, model: PreTrainedModel) -> None:
        """Bend ``model``; a part does this, and leaves the rest to the next."""


@Mutant(
    "I7.long-sequences", "a table of positions of a fixed size", "only positions from 1[23][0-9] on are wrong"
)
class ClampedPositions(_Adopts):
    """A table of 128 positions; later ones get the last."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        model.base_model.register_forward_pre_hook(_clamp, with_kwargs=True)


def _clamp(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"position_ids": kwargs["position_ids"].clamp(max=127)}


@Mutant(
    "I7.long-sequences",
    "use_sliding_window is not asked for",
    "only positions from 1[23][0-9] on are wrong",
    family="qwen3",
)
class WindowOf128(_Adopts):
    """Every layer sees 128 tokens back, whatever the config sets."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        layers: Iterable[Any] = model.modules()
        for module in layers:
            if hasattr(module, "sliding_window"):
                module.sliding_window = 128


@Mutant("I7.large-vocabulary", "token ids as int16", "only tokens after an id above 32,767")
class IdsInSixteenBits(_Adopts):
    """Ids pass through int16 on their way to the embedding."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        model.base_model.register_forward_pre_hook(_narrow, with_kwargs=True)


def _narrow(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ids = kwargs["input_ids"].to(torch.int16).long()
    return args, kwargs | {"input_ids": torch.where(ids < 0, ids + module.config.vocab_size, ids)}


@Mutant("I7.long-sequences", "a hard-coded rotary base", "rope_theta of the config is ignored")
class ThetaByDefault(_Adopts):
    """Rotary frequencies of the usual base."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        _set_rope(model, rope_theta=10_000.0)


@Mutant("I7.long-sequences", "rope_scaling is ignored", "rope scaling of the config is ignored")
class UnscaledRotary(_Adopts):
    """The scaling of rotary frequencies is not known."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        _set_rope(model, rope_type="default")


@Mutant("I7.long-sequences", "the attention factor of yarn", "logprobs of .* differs", family="qwen3")
class YarnKeepsScores(_Adopts):
    """Yarn's frequencies without its factor of the scores."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        rotary: Any = model.base_model.rotary_emb
        rotary.attention_scaling = 1.0


def _set_rope(model: PreTrainedModel, **values: object) -> None:
    """Give ``model`` the frequencies of a config with other ``values``; its own config stays."""
    rotary: Any = model.base_model.rotary_emb
    config = type(model.config).from_dict(model.config.to_dict())
    config.rope_parameters = {**config.rope_parameters, **values}
    rotary.inv_freq.copy_(type(rotary)(config).inv_freq)


@Mutant("I7.long-sequences", "a hard-coded epsilon", "the epsilon of norms of the config is ignored")
class EpsilonByDefault(_Adopts):
    """Norms have an epsilon of 1e-6."""

    def change(self, model: PreTrainedModel) -> None:
        super().change(model)
        layers: Iterable[Any] = model.modules()
        for module in layers:
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-6


@Mutant(
    "I1.many-sequences",
    "a list of layers that was written for a smaller model",
    r"gradients of 190 sequences[\s\S]*layers\.2\.",
)
class TrainsTwoLayers(Packed):
    """Layers from the third on have no gradient."""

    def reduce_grads(self) -> None:
        for name, parameter in self.model.named_parameters():
            if ".layers.2." in name:
                parameter.grad = None
        super().reduce_grads()


@Mutant(
    "I7.long-sequences", "a buffer of 4,096 tokens", "only tokens from number 409[6-9] of a pass on are wrong"
)
class ShortPass(Packed):
    """Log-probs behind the 4,096th token of a pass are 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return _only(output, torch.arange(micro_batch.num_tokens) < 4096)


@Mutant(
    "I7.long-sequences", "a buffer of 128 sequences", "only sequences from number 128 of a pass on are wrong"
)
class FewSequences(Packed):
    """Log-probs behind the 128th sequence of a pass are 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        end = int(micro_batch.cu_seqlens[min(128, micro_batch.num_sequences)])
        return _only(output, torch.arange(micro_batch.num_tokens) < end)


def _only(output: ModelOutput, known: Tensor) -> ModelOutput:
    if output.logprobs is None:
        return output
    return replace(output, logprobs=torch.where(known, output.logprobs, 0.0))


@Mutant("I1.many-sequences", "a ring of 16 micro-batches", "gradients of 190 sequences in 20 micro-batches")
class FewMicroBatches(Packed):
    """Micro-batches behind the 16th have no backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches[:16], step, mode)
        with torch.no_grad():
            HFBackend.run(self, micro_batches[16:], step, "forward")


@dataclass
class _Warmer:
    """A step whose temperature is 0.5 at least."""

    step: MicroBatchStep

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.step, name)
        return max(value, 0.5) if name == "temperature" else value

    def __call__(self, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor:
        return self.step(output, micro_batch)


@Mutant(
    "I8.low-temperature", "a clamp against division by 0", r"are those of temperature 0\.5: is it clamped"
)
class TemperatureClamped(Packed):
    """Temperatures below 0.5 are taken for 0.5."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return super().outputs(micro_batch, _Warmer(step))


@Mutant(
    "I20.many-updates", "lr or default", "weights after 4 updates with a learning rate of 0|after 20 updates"
)
class ZeroRateIsUnset(Packed):
    """A learning rate of 0 is taken for none, so that the config's is used."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.context.config.optimizer is not None
        super().step(scale, lr or self.context.config.optimizer.lr, count)


@Mutant("I1.gradient-sizes", "gradients reduced in float16", r"gradients of a loss times 2\^-80")
class GradientsInFloat16(Packed):
    """Gradients have the range of float16 on their way to the sum over ranks."""

    def reduce_grads(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs()
                parameter.grad[size < TINY] = 0.0
                parameter.grad[size > torch.finfo(torch.float16).max] = torch.inf
        super().reduce_grads()


TINY = 2.0**-24
"""The smallest number above 0 in float16."""
