"""Alignment, attention, precision and modes of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.checkpoint.model_config import read_config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.engine.step import TrainStep
from core_rl.errors import ConfigError
from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.segments import Segments
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS
from mutants.bases import Packed, TrainContext, inside
from mutants.zoo import C, Mutant


def _rolled(value: Tensor) -> Tensor:
    """One position later; the first token keeps its 0."""
    return torch.cat([value[:1], value[:-1]])


@Mutant("I7.logprobs", "verl #3287", "one position too late")
class OneTokenLate(ReferenceBackend):
    """Log-probs stand at the token after theirs."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        return {name: _rolled(value) for name, value in super().sequence(ids, step).items()}


@Mutant("I7.logprobs", "SkyRL #1304", "only the last token")
class LastTokenLost(ReferenceBackend):
    """The last token of each sequence has no log-prob, so EOS is never trained."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if "logprobs" in outputs and len(ids) > 1:
            outputs["logprobs"] = F.pad(outputs["logprobs"][:-1], (0, 1))
        return outputs


@Mutant(
    "I7.layers",
    "a constant of one layer alone",
    r"first at layer 2, sequence 0, token 0 of[\s\S]*token of sequence 0: [\s\S]*\n +0 \.+\n +1 \.+\n +2 [1-9]",
)
class SecondLayerEpsilon(ReferenceBackend):
    """The second layer divides by another epsilon, as by the default of a config without the field."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        norm: Any = self.model.get_submodule("model.layers.1.input_layernorm")
        norm.variance_epsilon = 1e-3


@Mutant("I7.logprobs", "one-sided drift", "always in one direction")
class SmallDrift(ReferenceBackend):
    """Log-probs are a hair too large, all of them: far below any tolerance for a single token."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if "logprobs" in outputs:
            outputs["logprobs"] = torch.cat([outputs["logprobs"][:1], outputs["logprobs"][1:] + 7e-6])
        return outputs


@Mutant("I7.logprobs", "verl #6150", "rounded to bfloat16")
class HalfPrecisionHead(ReferenceBackend):
    """Logits are rounded to bfloat16 in a float32 engine."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        return ReferenceBackend.language_model(ids, logits.bfloat16().float(), step)


@Mutant("I7.entropy", "TRL #3715", "entropy")
class EntropyOverPadding(ReferenceBackend):
    """The softmax of the entropy runs over a vocabulary that is padded to a multiple of 64."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = ReferenceBackend.language_model(ids, logits, step)
        if "entropy" in outputs:
            padded = F.pad(logits[:-1], (0, -logits.shape[1] % 64))
            log_p = F.log_softmax(padded, dim=-1)
            outputs["entropy"] = F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0))
        return outputs


@dataclass(frozen=True)
class WithTemperature:
    """A step that shows an engine another temperature."""

    step: MicroBatchStep
    temperature: float

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        return self.step.outputs

    @property
    def trained_only(self) -> bool:
        return self.step.trained_only

    @property
    def share_prefixes(self) -> bool:
        return self.step.share_prefixes

    def __call__(self, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor:
        return self.step(output, micro_batch)


@Mutant("I8.temperature", "NeMo-RL #316", r"the temperature 0\.6 is left out")
class IgnoresTemperature(ReferenceBackend):
    """Log-probs are computed at temperature 1, whatever was asked for."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        return super().sequence(ids, WithTemperature(step, 1.0))


@Mutant("I7.logits", "TRL #4159", r"the temperature 0\.6 is left out")
class LogitsWithoutTemperature(ReferenceBackend):
    """Log-probs are right; logits come as the model gave them."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if "logits" in outputs:
            outputs["logits"] = outputs["logits"] * step.temperature
        return outputs


@Mutant("I7.values", "I8", r"multiplied by 1\.66667")
class ValuesOverTemperature(ReferenceBackend):
    """Values are divided by the temperature."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {n: v / step.temperature if n == "values" else v for n, v in outputs.items()}


@Mutant("I7.scores", "one division for all heads (I8)", r"multiplied by 1\.66667")
class ScoresOverTemperature(ReferenceBackend):
    """Scores are divided by the temperature."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {n: v / step.temperature if n == "scores" else v for n, v in outputs.items()}


@Mutant("I7.scores", "alignment", "scores at temperature 1 differs")
class ScoresTheFirstToken(ReferenceBackend):
    """The score comes from the wrong end of the sequence."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if "scores" in outputs:
            outputs["scores"] = super().sequence(ids[:1], step)["scores"]
        return outputs


@Mutant("I7.scores", "transformers' sequence classification", "scores of sequences that end in the")
class ScoresTheTokenBeforePadding(ReferenceBackend):
    """The score is that of the last token without the id of padding."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        padding = getattr(self.model.config, "pad_token_id", None)
        others = [] if padding is None else (ids != padding).nonzero().flatten().tolist()
        is_reward = self.context.config.model.head == "reward"
        return super().sequence(ids[: others[-1] + 1] if is_reward and others else ids, step)


@Mutant("I6.neighbours", "AReaL #1442", "neighbours")
class AttendsToNeighbours(Packed):
    """Causal attention over the whole pack, across the boundaries of sequences."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        base = self.packed.model.base_model

        def one_segment(
            module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "segments": Segments((0, micro_batch.num_tokens))}

        hook = base.register_forward_pre_hook(one_segment, with_kwargs=True)
        try:
            return super().outputs(micro_batch, step)
        finally:
            hook.remove()


@Mutant("I6.layer-kinds", "verl #6660", "logprobs of qwen3_5_text")
class StateCrosses(Packed):
    """Layers with a state run over the whole pack, as transformers computes them."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for layer in self.packed.stateful.layers.values():
            del layer.forward

    def verify(self) -> None:
        """Without the toolkit's probe, which would refuse the model."""


@Mutant("I6.layer-kinds", "classes of a refusal", "refused by a ConfigError; raise an UnsupportedCapability")
class RefusesByConfigError(ReferenceBackend):
    """An honest refusal that reads like a config that is wrong everywhere."""

    def build(self, context: TrainContext) -> None:
        if (kind := read_config(context.config.model).model_type) in OTHER_LAYERS:
            raise ConfigError(f"{kind!r} is not supported")
        super().build(context)


@Mutant("I6.neighbours", "OpenRLHF #217", "neighbours", family="gpt2")
class PositionsRunOn(Packed):
    """Positions do not restart in each packed sequence; rotary embeddings hide it, absolute ones do not."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        base = self.packed.model.base_model

        def running(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            positions = torch.arange(micro_batch.num_tokens)[None] % 64
            return args, {**kwargs, "position_ids": positions}

        hook = base.register_forward_pre_hook(running, with_kwargs=True)
        try:
            return super().outputs(micro_batch, step)
        finally:
            hook.remove()


@Mutant("I7.long-batch", "chunked kernels", "every 512th position")
class ChunkEdge(Packed):
    """The last row of each full chunk of a chunked kernel is dropped."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None:
            return output
        keep_mask = torch.arange(micro_batch.num_tokens) % 512 != 511
        return replace(output, logprobs=torch.where(keep_mask, output.logprobs, 0.0))


@Mutant("I7.logprobs", "TRL #3200", "after one with the id 0")
class ZeroIsPadding(ReferenceBackend):
    """Tokens with the id 0 are taken for padding and masked in attention."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head != "lm":
            return super().sequence(ids, step)
        mask = (ids != 0).long()[None]
        logits = self.model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0].float()
        return self.language_model(ids, logits / step.temperature, step)


@Mutant("contract.order", "order of packing", "belong to other")
class SortsByLength(ReferenceBackend):
    """Sequences are sorted by length inside a micro-batch, and their outputs stay in that order."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        order = sorted(range(micro_batch.num_sequences), key=lambda index: -micro_batch.lengths[index])
        return super().outputs(micro_batch.select(order), step)


@Mutant("I9.dropout-off", "verl #4708", "by forward")
class DropoutInEvaluation(ReferenceBackend):
    """The module stays in training mode."""

    def set_training(self, training: bool) -> None:
        self.model.train()


@Mutant("I9.dropout-off", "verl #4708", "after a forward")
class NeverBackInTrainingMode(ReferenceBackend):
    """The first evaluation turns dropout off for good."""

    _evaluated = False

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self._evaluated |= mode == "forward"
        super().run(micro_batches, step, mode)

    def set_training(self, training: bool) -> None:
        self.model.train(training and not self._evaluated)


@Mutant(
    "contract.undeclared",
    "an option that is ignored",
    "'logits' is not declared",
    undeclared=frozenset({C.LOGITS}),
)
@inside(ReferenceBackend, "step")
class GivesUndeclaredLogits(TrainStep):
    """A forward pass ignores the spec."""

    def forward(
        self, batch: SequenceBatch, mb_spec: MicroBatchSpec, outputs: tuple[OutputName, ...], *rest: Any
    ) -> Any:
        return super().forward(batch, mb_spec, ("logprobs",) if outputs == ("logits",) else outputs, *rest)
