"""Learning from pairs of a preferred and a rejected sequence: DPO (arXiv:2305.18290) and its family, reward models.

A pair is a ``unit`` of two sequences, of which ``chosen [B]`` marks one, so it is never cut apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, units
from core_rl.data.outputs import ModelOutput, masked_fill, segment_sum
from core_rl.errors import BatchError, raise_all
from core_rl_trainer.algorithms.aggregation import sequence_mean
from core_rl_trainer.algorithms.fields import CHOSEN, MARGIN, REFERENCE, SCORES, require_fields
from core_rl_trainer.algorithms.interface import TrainEngineLike
from core_rl_trainer.algorithms.sft import SupervisedInterface


def find_pairs(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Chosen and rejected sequence of each pair, int64 ``[P]``, by first appearance; raises as `check_pairs` does."""
    check_pairs(batch)
    marked = batch[CHOSEN].bool().tolist()
    ordered = [sorted(unit, key=lambda b: not marked[b]) for unit in units(batch)]
    chosen, rejected = torch.tensor(ordered, dtype=torch.long, device=batch.device).reshape(-1, 2).unbind(1)
    return chosen, rejected


def count_pairs(batch: SequenceBatch) -> float:
    """The number of pairs: the weight of a loss on them."""
    return batch.num_sequences / 2


def check_pairs(batch: SequenceBatch) -> None:
    """Raise one `BatchError` that names every unit that is no pair."""
    present = {"unit": batch.unit is not None, CHOSEN: CHOSEN in batch}
    if missing := [name for name, is_present in present.items() if not is_present]:
        raise BatchError(f"preference pairs need {missing}: sequences of a pair share a number in 'unit'")
    raise_all(BatchError, "preference pairs", _pair_violations(batch))


def _pair_violations(batch: SequenceBatch) -> Iterable[str]:
    marked = batch[CHOSEN].bool().tolist()
    for unit in units(batch):
        if len(unit) != 2:
            yield f"the unit of sequences {unit} has {len(unit)} sequences; a pair has two"
        elif marked[unit[0]] == marked[unit[1]]:
            yield f"sequences {unit} are {'both' if marked[unit[0]] else 'neither'} 'chosen'; one of a pair is"


def _pair_metrics(
    name: str, losses: Tensor, chosen: Tensor, rejected: Tensor, scale: float = 1.0
) -> dict[str, Metric]:
    """Means over pairs ``[P]``; ``name`` is the quantity that ``scale`` times ``chosen`` and ``rejected`` are."""
    means = {
        "preference_loss": losses,
        "accuracy": torch.heaviside(chosen - rejected, chosen.new_tensor(0.5)),  # a tie counts as a half
        f"{name}_gap": scale * (chosen - rejected),
        f"{name}_chosen": scale * chosen,
        f"{name}_rejected": scale * rejected,
    }
    return {metric: Metric.mean(value.sum(), len(losses)) for metric, value in means.items()}


class DPOConfig(Config):
    """Settings of DPO, and the loss of each pair from its gain.

    The gain is the log-ratio to the reference, ``ref_logprobs [T]``, of the chosen sequence minus that of the rejected
    one. ``dpo`` is ``-log sigmoid(beta * gain)``, with labels wrong as often as ``label_smoothing``; ``ipo`` is
    ``(gain - 1 / (2 * beta))^2``, with means over tokens; ``hinge`` is ``max(0, 1 - beta * gain)``.
    """

    other_names: ClassVar[Mapping[str, str]] = {"loss_type": "variant"}

    variant: Literal["dpo", "ipo", "hinge"] = "dpo"
    """``dpo``, ``ipo`` (arXiv:2310.12036) or ``hinge`` (SLiC, arXiv:2305.10425)."""
    beta: float = Field(default=0.1, gt=0.0)
    """The strength of the penalty for leaving the reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of labels that are taken to be wrong; for ``dpo`` alone."""

    @model_validator(mode="after")
    def _smoothed(self) -> Self:
        if self.label_smoothing and self.variant != "dpo":
            raise ValueError(f"label_smoothing belongs to variant 'dpo', and this is {self.variant!r}")
        return self

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
            case "dpo":  # arXiv:2305.18290, equation 7; with smoothing https://ericmitchell.ai/cdpo.pdf
                right, wrong = logsigmoid(self.beta * gain), logsigmoid(-self.beta * gain)
                losses = -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
            case "ipo":  # arXiv:2310.12036, equation 17, over means of tokens, as its authors have it and TRL
                means = sequence_mean(difference, batch)
                losses = (means[chosen] - means[rejected] - 1 / (2 * self.beta)).square()
            case "hinge":  # SLiC (arXiv:2305.10425; as in RSO, arXiv:2309.06657)
                losses = torch.relu(1 - self.beta * gain)
        return losses.sum(), _pair_metrics("reward", losses, ratios[chosen], ratios[rejected], self.beta)


class DPOInterface(SupervisedInterface[DPOConfig]):
    """Batches of pairs: ``chosen [B]``, ``unit``, ``loss_mask`` and ``ref_logprobs [T]``, which never change."""

    config_class = DPOConfig
    trains_on = "preferences"

    @property
    def wanted_fields(self) -> frozenset[str]:
        """``ref_logprobs``: computed once for each sequence, before the first update."""
        return frozenset({REFERENCE})

    def loss(self) -> LossSpec:
        return self.config.spec()

    def check(self, batch: SequenceBatch) -> None:
        """Raise `BatchError` that names invalid pairs and missing fields."""
        require_fields("DPO", batch, {REFERENCE})
        check_pairs(batch)


class RewardModelConfig(Config):
    """Settings of a reward model, and its loss of the scores of a pair: ``-log sigmoid(chosen - rejected - margin)``.

    Bradley and Terry, Biometrika 39, 1952; InstructGPT, arXiv:2203.02155, equation 1. The sequence field ``margin`` is
    optional, as in Llama 2, arXiv:2307.09288, equation 2.
    """

    center_coef: float = Field(default=0.0, ge=0.0)
    """Weight of ``(chosen + rejected)^2``, which keeps scores around 0 (arXiv:2312.09244, equation 6)."""

    def spec(self) -> LossSpec:
        """The loss as a train engine with a reward head takes it."""
        return LossSpec(fn=self, weight_fn=count_pairs, outputs=("scores",))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The scalar sum over pairs; metrics are means over pairs."""
        (first, second), scores = find_pairs(batch), output["scores"]
        chosen, rejected = scores[first], scores[second]
        margin = batch[MARGIN][first] if MARGIN in batch else torch.zeros_like(chosen)
        losses = -logsigmoid(chosen - rejected - margin)
        total = (losses + self.center_coef * (chosen + rejected).square()).sum()
        return total, _pair_metrics("score", losses, chosen, rejected)


class RewardModelInterface(SupervisedInterface[RewardModelConfig]):
    """Batches of pairs: ``chosen [B]`` and ``unit``."""

    config_class = RewardModelConfig
    trains_on = "preferences"

    def loss(self) -> LossSpec:
        return self.config.spec()

    def check(self, batch: SequenceBatch) -> None:
        """Raise `BatchError` that names invalid pairs."""
        check_pairs(batch)

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``scores [B]``, the reward of each whole sequence."""
        output = engine.forward(batch, mb_spec, ("scores",))
        return batch.with_sequences(**{SCORES: output["scores"]})
