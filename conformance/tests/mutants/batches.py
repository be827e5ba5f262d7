"""Kinds of batches that a pass forgets, and batches that a call changes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import TensorSource
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.engine.step import TrainStep
from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.parallel_context import ModelShards
from mutants.bases import OwnExport, Packed, TrainContext, inside
from mutants.images import QWEN, VISION
from mutants.shared_prefixes import SHARED, FirstTokenFromSibling, Sharing
from mutants.zoo import Mutant

CHECK = "I1.combined-batches"


@Mutant(CHECK, "GRPO's first step, at a ratio of 1", "values: (a loss|some losses) of 0")
class SkipsLossOfZero(Packed):
    """A micro-batch whose loss is exactly 0 has no backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward" and float(loss) != 0.0:
                loss.backward()


@Mutant(CHECK, "groups of equal rewards next to a bonus", "gradients .*values: equal rewards")
class SkipsEqualRewards(Packed):
    """A micro-batch whose advantages are all 0 has no backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward" and bool(part["advantages"].any()):
                loss.backward()


class _WithoutGradient(Packed):
    """The outputs of some sequences have no gradient."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        dropped = torch.tensor(self.dropped(micro_batch))
        lengths = torch.tensor(micro_batch.lengths)
        fields = {}
        for name, value in output.items():
            mask = dropped if len(value) == len(dropped) else dropped.repeat_interleave(lengths)
            fields[name] = torch.where(mask, value.detach(), value)
        return ModelOutput(**fields)

    def dropped(self, micro_batch: SequenceBatch) -> list[bool]:
        """Whether each sequence is one of these."""
        raise NotImplementedError


@Mutant(CHECK, "a buffer of 64 sequences", "gradients .*sequences: 65")
class LosesSequence65(_WithoutGradient):
    """The 65th sequence of a pass is not trained."""

    def dropped(self, micro_batch: SequenceBatch) -> list[bool]:
        return [number >= 64 for number in range(micro_batch.num_sequences)]


@Mutant(CHECK, "rewards that are trained in pairs", r"head: reward.*sequences: (65|one)[\s\S]*count 0 times")
class LastOfOddRewardsIsNotTrained(Packed):
    """Rewards are trained in pairs; the score of a sequence without a partner has no gradient."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if (scores := output.scores) is None or len(scores) % 2 == 0:
            return output
        return replace(output, scores=torch.cat([scores[:-1], scores[-1:].detach()]))


@Mutant(CHECK, "samples that are the same", "gradients .*sequences: ")
class TrainsEqualSequencesOnce(_WithoutGradient):
    """Of equal sequences of a pass the first is trained."""

    def dropped(self, micro_batch: SequenceBatch) -> list[bool]:
        ids = [tuple(part.tolist()) for part in micro_batch.input_ids.split(micro_batch.lengths)]
        return [ids.index(part) < number for number, part in enumerate(ids)]


@Mutant(CHECK, "a second chunk of 64 sequences that is written from the start", "scores .*sequences: 65")
class ScoresTheFirstChunkAgain(Packed):
    """Scores behind the 64th repeat the first ones."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.scores is None or micro_batch.num_sequences <= 64:
            return output
        first = output.scores[: micro_batch.num_sequences - 64]
        return replace(output, scores=torch.cat([output.scores[:64], first]))


@Mutant(CHECK, "a head that a feature forgets", "scores .*shared prefixes", declared=SHARED)
class ScoresWithoutSharing(Sharing):
    """Scores of sequences that share prefixes are those of the rows in the order of the tree."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output, tree = super().outputs(micro_batch, step), self.tree(micro_batch, step)
        if tree is None or output.scores is None:
            return output
        return replace(output, scores=output.scores.roll(1))


@Mutant(
    CHECK,
    "values shifted by one over a pack, where the row before is another branch's",
    "values .*shared prefixes",
    declared=SHARED,
)
class ValueOfSibling(FirstTokenFromSibling):
    """The value before the first token of a branch is that after the branch before it."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.head != "value":
            self.packed.shards = ModelShards()


@Mutant(CHECK, "one option that turns another one off", "head: lm at a temperature")
class TemperatureOfSeveralSequences(Packed):
    """The temperature is for micro-batches of several sequences."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        temperature = step.temperature if micro_batch.num_sequences > 1 else 1.0
        arguments = (step.outputs, temperature, step.trained_only)
        return ModelOutput(**self.packed(micro_batch, *arguments))


@Mutant(CHECK, "three options together", "head: lm at a temperature.* sequences: 6[45].* cut: none")
class TemperatureOfFewSequences(Packed):
    """The temperature is for micro-batches of fewer than 64 sequences."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        temperature = step.temperature if micro_batch.num_sequences < 64 else 1.0
        return ModelOutput(**self.packed(micro_batch, step.outputs, temperature, step.trained_only))


@Mutant(
    "contract.callers-batch",
    "pixels that are scaled in place",
    r"forward\(\) changed pixel_values of sequence \d+ of the caller's batch",
    family=QWEN,
    declared=VISION,
)
class ScalesPixels(ReferenceBackend):
    """A forward pass scales pixels in place."""

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        for media in row.media if not step.trained_only else ():
            if "pixel_values" in media:
                media["pixel_values"].mul_(0.5)
        return super().routed(row, step)


@Mutant(
    "contract.callers-batch",
    "copies on a device that are kept",
    "advantages that the caller changed .* not read",
)
@inside(ReferenceBackend, "step")
class KeepsCopiesOfBatches(TrainStep):
    """Each pass over a batch object reads the fields of the first one."""

    def forward_backward(self, batch: SequenceBatch, *rest: Any) -> dict[str, float]:
        copies = self.__dict__.setdefault("_copies", {})
        _, first = copies.setdefault(id(batch), (batch, deepcopy(batch)))
        return super().forward_backward(first, *rest)


@Mutant(
    "contract.callers-batch",
    "load_state_dict(assign=True)",
    r"a step after load_named_tensors\(\) changed the caller's",
)
class AssignsLoadedTensors(OwnExport):
    """Parameters share the memory of the tensors that are loaded."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, source)
        for name, parameter in self.model.named_parameters() if kind == "master" else ():
            if name in source.names():
                parameter.data = source.read(name)


@Mutant(
    "contract.callers-batch",
    "outputs that are kept by the object",
    "of a batch that was used before .* differ from a fresh one's",
    family=QWEN,
    declared=VISION,
)
class KeepsOutputsOfImages(ReferenceBackend):
    """The outputs of a sequence with images are kept for the next pass over the same pixels."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.known: dict[int, tuple[object, dict[str, Tensor]]] = {}

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        pixels = [media["pixel_values"] for media in row.media if "pixel_values" in media]
        if not pixels or step.trained_only:
            return super().routed(row, step)
        if id(pixels[0]) not in self.known:
            self.known[id(pixels[0])] = (pixels[0], super().routed(row, step))
        return self.known[id(pixels[0])][1]
