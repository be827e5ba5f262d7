"""The plain trainer in processes of its own, and mutants that answer wrongly from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl_conformance.trainers.interface import MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.policy_losses import PolicyLoss
from trainers.plain import PlainTrainer


class GlooTrainer(PlainTrainer):
    """One part of the batch in each process."""

    def build(self, setup: TrainerSetup) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        super().build(replace(setup, ranks=1))

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        rows = [(row, row.advantages) for row in sequences]
        self.total_weight = self.summed(self.weight(rows, self.setup.loss))
        return super().train_batch(sequences, cut, apply)

    def divisor(self, rows: object, part: object, batch: object, loss: PolicyLoss) -> float:
        return self.total_weight

    def reduce(self, total: float) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return self.summed(total)

    def save(self, path: str) -> None:
        if dist.get_rank() == 0:
            super().save(path)
        dist.barrier()

    def clipped_fraction(self, clipped: Sequence[Tensor], cut: MicroBatches) -> float:
        flags = torch.cat(list(clipped)).double()
        return self.summed(float(flags.sum())) / self.summed(float(len(flags)))

    def summed(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)


class AnswersOnOneRank(GlooTrainer):
    """Metrics on the first rank alone."""

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        metrics = super().train_batch(sequences, cut, apply)
        return metrics if dist.get_rank() == 0 else {}


class OwnLoss(GlooTrainer):
    """The loss of each rank's own part."""

    def reduce(self, total: float) -> float:
        super().reduce(total)
        return total


class TensorsOnLastRank(GlooTrainer):
    """Gradients on the last rank alone."""

    def gradients(self) -> Mapping[str, Tensor]:
        return super().gradients() if dist.get_rank() == dist.get_world_size() - 1 else {}


class Raises(GlooTrainer):
    """The second rank raises, and the others have finished."""

    def gradients(self) -> Mapping[str, Tensor]:
        if dist.get_rank() == 1:
            raise ArithmeticError("no gradients here")
        return super().gradients()


class Ends(GlooTrainer):
    """The second rank ends."""

    def gradients(self) -> Mapping[str, Tensor]:
        if dist.get_rank() == 1:
            os._exit(3)
        return super().gradients()
