"""Direct preference optimisation (arXiv:2305.18290) and two losses of its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_fill, segment_sum
from core_rl_trainer.algorithms.aggregation import sequence_mean
from core_rl_trainer.algorithms.fields import BEHAVIOUR, REFERENCE, require_fields
from core_rl_trainer.algorithms.interface import TrainEngineLike
from core_rl_trainer.algorithms.preferences import (
    check_pairs,
    count_pairs,
    dpo_loss,
    find_pairs,
    hinge_loss,
    ipo_loss,
)
from core_rl_trainer.algorithms.sft import SupervisedInterface

__all__ = ["DPOConfig", "DPOInterface", "DPOLoss"]

Variant = Literal["dpo", "ipo", "hinge"]


class DPOConfig(Config):
    """Settings of DPO."""

    variant: Variant = "dpo"
    """``dpo``, ``ipo`` (arXiv:2310.12036) or ``hinge`` (SLiC, arXiv:2305.10425)."""
    beta: float = Field(default=0.1, gt=0.0)
    """The strength of the penalty for leaving the reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """How often labels are taken to be wrong; for ``dpo`` alone."""

    @model_validator(mode="after")
    def _smoothed(self) -> Self:
        if self.label_smoothing and self.variant != "dpo":
            raise ValueError(f"label_smoothing belongs to variant 'dpo', and this is {self.variant!r}")
        return self


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """The loss of each pair from the log-ratios to the reference, ``ref_logprobs [T]``, of its trained tokens."""

    variant: Variant = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def spec(self) -> LossSpec:
        """The loss as a train engine takes it."""
        return LossSpec(fn=self, weight_fn=count_pairs)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum over pairs; metrics are means over pairs, rewards are ``beta`` times log-ratios."""
        (chosen, rejected), mask = find_pairs(batch), batch.loss_mask
        difference = masked_fill(output["logprobs"], mask) - masked_fill(batch[REFERENCE], mask)
        ratios = segment_sum(difference, batch.cu_seqlens)
        gain = ratios[chosen] - ratios[rejected]
        match self.variant:
            case "dpo":
                losses = dpo_loss(gain, self.beta, self.label_smoothing)
            case "ipo":
                means = sequence_mean(difference, batch)
                losses = ipo_loss(means[chosen] - means[rejected], self.beta)
            case "hinge":
                losses = hinge_loss(gain, self.beta)
        return losses.sum(), self._metrics(losses, ratios[chosen], ratios[rejected])

    def _metrics(self, losses: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
        means = {
            "preference_loss": losses,
            "accuracy": torch.heaviside(chosen - rejected, losses.new_tensor(0.5)),  # a tie counts as a half
            "reward_gap": self.beta * (chosen - rejected),
            "reward_chosen": self.beta * chosen,
            "reward_rejected": self.beta * rejected,
        }
        return {name: Metric.mean(torch.sum(value), len(losses)) for name, value in means.items()}


class DPOInterface(SupervisedInterface[DPOConfig]):
    """Batches of pairs: ``chosen [B]``, ``unit``, ``loss_mask`` and ``ref_logprobs [T]``, which never change."""

    config_class = DPOConfig
    trains_on = "preferences"

    @property
    def wanted_fields(self) -> frozenset[str]:
        """``ref_logprobs``: computed once for each sequence, before the first update."""
        return frozenset({REFERENCE})

    def loss(self) -> LossSpec:
        chosen = self.config
        return DPOLoss(
            variant=chosen.variant, beta=chosen.beta, label_smoothing=chosen.label_smoothing
        ).spec()

    def check(self, batch: SequenceBatch) -> None:
        """Raise `BatchError` that names what is no pair, or missing."""
        require_fields("DPO", batch, {REFERENCE})
        check_pairs(batch)

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``logprobs [T]``, those of the engine's weights; the caller stores the reference's."""
        return batch.with_tokens(**{BEHAVIOUR: engine.forward(batch, mb_spec)["logprobs"]})
