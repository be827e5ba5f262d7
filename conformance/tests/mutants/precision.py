"""Too small a dtype, or too much noise, where no single value is far off."""

from __future__ import annotations

from dataclasses import replace

import torch

from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from mutants.bases import Packed
from mutants.zoo import Mutant


class Autocast(Packed):
    """A correct engine in bfloat16: matrices multiply in it, and the softmax is in float32."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        with torch.autocast("cpu", torch.bfloat16):
            return super().outputs(micro_batch, step)


@Mutant(
    "I7.logprobs",
    "accelerate #3979: the float32 upcast is a no-op",
    "every value of the output 'logprobs' is a bfloat16 number",
    dtype="bfloat16",
)
class SoftmaxInHalf(Autocast):
    """The upcast before the softmax is lost."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return replace(output, logprobs=output["logprobs"].bfloat16().float())


@Mutant(
    "I7.scores",
    "accelerate #3979, for a head",
    "every value of the output 'scores' is a bfloat16 number",
    dtype="bfloat16",
)
class ScoresInHalf(Autocast):
    """The scalar head of a reward model is not in float32."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return output if output.scores is None else replace(output, scores=output.scores.bfloat16().float())


@Mutant(
    "I7.logprobs",
    "a kernel that is a little off at every token, and at none by much",
    "the root mean square error of logprobs .* no single value is far off",
)
class NoiseEverywhere(Packed):
    """An approximate kernel: each log-prob is off by half of the limit for a single value, up or down."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        signs = 1.0 - 2.0 * (micro_batch.position_ids % 2)
        noise = torch.where(micro_batch.position_ids > 0, 2e-5 * signs, 0.0)
        return replace(output, logprobs=output["logprobs"] + noise)
