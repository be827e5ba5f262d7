"""A reward model from pairwise preferences (arXiv:2203.02155): an engine with a reward head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl_trainer.algorithms.fields import MARGIN, SCORES
from core_rl_trainer.algorithms.interface import TrainEngineLike
from core_rl_trainer.algorithms.preferences import bradley_terry_loss, check_pairs, count_pairs, find_pairs
from core_rl_trainer.algorithms.sft import SupervisedInterface

__all__ = ["RewardLoss", "RewardModelConfig", "RewardModelInterface"]


class RewardModelConfig(Config):
    """Settings of a reward model."""

    center_coef: float = Field(default=0.0, ge=0.0)
    """Weight of ``(chosen + rejected)^2``, which keeps scores around 0 (arXiv:2312.09244, equation 6)."""


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """`bradley_terry_loss` of the scores of each pair; optional sequence field ``margin``."""

    center_coef: float = 0.0

    def spec(self) -> LossSpec:
        """The loss as a train engine with a reward head takes it."""
        return LossSpec(fn=self, weight_fn=count_pairs, outputs=("scores",))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum over pairs; metrics are means over pairs."""
        (first, second), scores = find_pairs(batch), output["scores"]
        chosen, rejected = scores[first], scores[second]
        margin = batch[MARGIN][first] if MARGIN in batch else torch.zeros_like(chosen)
        losses = bradley_terry_loss(chosen, rejected, margin)
        total = (losses + self.center_coef * (chosen + rejected).square()).sum()
        means = {
            "preference_loss": losses,
            "accuracy": torch.heaviside(chosen - rejected, scores.new_tensor(0.5)),  # a tie counts as a half
            "score_gap": chosen - rejected,
            "score_chosen": chosen,
            "score_rejected": rejected,
        }
        return total, {name: Metric.mean(value.sum(), len(losses)) for name, value in means.items()}


class RewardModelInterface(SupervisedInterface[RewardModelConfig]):
    """Batches of pairs: ``chosen [B]`` and ``unit``."""

    config_class = RewardModelConfig
    trains_on = "preferences"

    def loss(self) -> LossSpec:
        return RewardLoss(center_coef=self.config.center_coef).spec()

    def check(self, batch: SequenceBatch) -> None:
        """Raise `BatchError` that names what is no pair."""
        check_pairs(batch)

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``scores [B]``, the reward of each whole sequence."""
        output = engine.forward(batch, mb_spec, ("scores",))
        return batch.with_sequences(**{SCORES: output["scores"]})
