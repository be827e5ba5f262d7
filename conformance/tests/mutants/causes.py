"""Engines whose failure has a cause that the message must name: the temperature, the entropy, chance, a late step."""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.reference.train import ReferenceBackend
from mutants.bases import Replicated
from mutants.outputs import WithTemperature
from mutants.zoo import DP2, Mutant


@Mutant("I7.logprobs", "memory that nobody has written", "it looks like: not deterministic: the same call")
class NoiseInOutputs(ReferenceBackend):
    """Log-probs are a little different each time, as with uninitialized memory."""

    training_alone = False

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        outputs = super().outputs(micro_batch, step)
        if self.training_alone and not torch.is_grad_enabled():
            return outputs
        logprobs = outputs["logprobs"]
        noise = 1.0 + 0.1 * torch.rand(logprobs.shape)
        return ModelOutput(**{**dict(outputs.items()), "logprobs": logprobs * noise})


@Mutant("I1.gradients", "a race in training", "it looks like: not deterministic: the same call")
class NoiseInTraining(NoiseInOutputs):
    """The same in training passes alone."""

    training_alone = True


@Mutant("I1.gradients", "AReaL #581", r"it looks like: the temperature 0\.8 is left out")
class TrainsAtTemperatureOne(ReferenceBackend):
    """The temperature is heeded in forward passes and forgotten in training."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        return super().sequence(ids, WithTemperature(step, 1.0) if torch.is_grad_enabled() else step)


@Mutant(
    "I1.gradients",
    "labels that a collator has rolled already",
    "it looks like: labels are rolled one token too far",
)
class RollsLabelsTwice(ReferenceBackend):
    """In training, labels that the data pipeline has rolled are rolled again."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        labels = ids.roll(-1) if torch.is_grad_enabled() else ids
        return ReferenceBackend.language_model(labels, logits, step)


@Mutant(
    "I7.logprobs",
    "a vocabulary padded for tensor parallelism",
    r"it looks like: the softmax counts (\d+ more columns|the columns that pad)",
)
class CountsPaddedColumns(ReferenceBackend):
    """The softmax counts the columns that pad the vocabulary to a multiple of 64."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        size = logits.shape[-1]
        padded = torch.nn.functional.pad(logits, (0, -size % 64 or 64))
        outputs = ReferenceBackend.language_model(ids, padded, step)
        return {name: value[:, :size] if name == "logits" else value for name, value in outputs.items()}


@Mutant(
    "I1.gradients",
    "an entropy bonus that trains nothing",
    "it looks like: the entropy is left out, or has no gradient",
)
class EntropyIsDetached(ReferenceBackend):
    """The entropy is right and has no gradient."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {name: value.detach() if name == "entropy" else value for name, value in outputs.items()}


@Mutant(
    "I7.entropy",
    "an estimate that is taken for the entropy",
    "it looks like: the entropy is minus the log-prob of the drawn token",
)
class EntropyOfTheDrawnToken(ReferenceBackend):
    """Minus the log-prob of the drawn token is taken for the entropy, which it is on average."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = ReferenceBackend.language_model(ids, logits, step)
        if "entropy" in outputs:
            drawn = logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            outputs["entropy"] = torch.nn.functional.pad(-drawn, (1, 0))
        return outputs


@Mutant(
    "I1.gradients",
    "a wrapper of the model whose hooks never run",
    "it looks like: gradients of data-parallel rank 0 alone: they are not summed over the 2 ranks",
    layout=DP2,
)
class NeverReducesGradients(Replicated):
    """Each data-parallel rank steps by its own gradients."""

    def reduce_grads(self) -> None:
        pass


@Mutant("I20.adamw", "a step that is lost", r"weights are off from step 3 on \(of 8, from 0\)")
class RestsAtTheFourthStep(ReferenceBackend):
    """The fourth step has a learning rate of 0."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, 0.0 if count == 4 else lr, count)
