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


class SoftmaxInHalf(Autocast):
    """The upcast before the softmax is lost."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return replace(output, logprobs=output["logprobs"].bfloat16().float())


class ScoresInHalf(Autocast):
    """The scalar head of a reward model is not in float32."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return output if output.scores is None else replace(output, scores=output.scores.bfloat16().float())


class NoiseEverywhere(Packed):
    """An approximate kernel: each log-prob is off by half of the limit for a single value, up or down."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        signs = 1.0 - 2.0 * (micro_batch.position_ids % 2)
        noise = torch.where(micro_batch.position_ids > 0, 2e-5 * signs, 0.0)
        return replace(output, logprobs=output["logprobs"] + noise)


MUTANTS = [
    Mutant(
        engine=SoftmaxInHalf,
        killed_by="I7.logprobs",
        issue="accelerate #3979: the float32 upcast is a no-op",
        says="every value of the output 'logprobs' is a bfloat16 number",
        dtype="bfloat16",
    ),
    Mutant(
        engine=ScoresInHalf,
        killed_by="I7.scores",
        issue="accelerate #3979, for a head",
        says="every value of the output 'scores' is a bfloat16 number",
        dtype="bfloat16",
    ),
    Mutant(
        engine=NoiseEverywhere,
        killed_by="I7.logprobs",
        issue="a kernel that is a little off at every token, and at none by much",
        says="the root mean square error of logprobs .* no single value is far off",
    ),
]
