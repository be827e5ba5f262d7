"""`Trainer`: the few calls by which the suite drives a framework that keeps its own loss, schedule and loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from core_rl.config.engine import DType
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.oracle import AdamW, Schedule
from core_rl_oracle.policy_losses import PolicyLoss

RECIPE_STEPS = 1000
"""Steps of a run whose settings leave their number to its data."""


@dataclass(frozen=True, kw_only=True)
class SGD:
    """``w - lr * gradient``, without momentum, decay and clipping."""

    lr: float


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """The model, the optimizer and the loss that a trainer is built with."""

    model_dir: str
    """Initial weights, in ``save_pretrained`` format."""
    optimizer: AdamW | SGD
    """Without weight decay, so that it does not matter which parameters decay."""
    schedule: Schedule
    """Schedule of the learning rate, by optimizer steps."""
    loss: PolicyLoss
    advantages: AdvantageRule | None
    """The rule that takes advantages from rewards; None takes the advantages of the sequences."""
    dtype: DType
    """Precision of computation; master weights are float32."""
    ranks: int
    """Data-parallel ranks."""
    seed: int
    adapter_dir: str | None = None
    """A low-rank adapter in ``peft`` format, which is trained in place of the model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """From the spec's profile; refuse unknown ones."""


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One sequence of ``L`` tokens: a prompt and a completion. Float fields are float32."""

    input_ids: Tensor
    """int64 ``[L]``"""
    loss_mask: Tensor
    """bool ``[L]``: trained tokens."""
    advantages: Tensor
    """``[L]``: meaningless where a rule takes them from rewards."""
    old_logprobs: Tensor
    """``[L]``: of the policy that drew the tokens, at the loss's temperature."""
    ref_logprobs: Tensor
    """``[L]``: of the frozen reference policy."""
    reward: float
    """Of the whole completion."""
    group: int
    """Number of its prompt. Neighbours of a group are a pair for an objective on pairs, the preferred one first."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The cut of a batch: nothing that a trainer computes may depend on it. Without a limit, all at once."""

    max_tokens: int | None = None
    """Most tokens of a micro-batch."""
    sequences: int | None = None
    """Sequences of a micro-batch."""

    def __str__(self) -> str:
        limits = {"tokens": self.max_tokens, "sequences": self.sequences}
        return ", ".join(f"{number} {unit}" for unit, number in limits.items() if number) or "whole batch"


class Trainer(Protocol):
    """A framework's trainer. With ``processes="each rank"``, all ranks get the same calls."""

    def build(self, setup: TrainerSetup) -> None:
        """Load the model and make the optimizer; an earlier model is gone."""

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        """Build as the framework's own configuration file ``recipe`` describes a run, with the model in ``model_dir``.

        For ``core-rl diff``, on one rank, in float32; its optimizer, schedule, loss and advantages are those of the
        file. A schedule whose length follows from data has `RECIPE_STEPS` steps.
        """

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """One optimizer step on the batch, or only its gradients if not ``apply``.

        Returns metrics of the whole batch: at least ``loss`` (the scalar that was minimised) and, of a step,
        ``grad_norm`` (over all parameters, before clipping).
        """

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the last ``train_batch(apply=False)``, before clipping, full tensors by checkpoint names.

        With an adapter, gradients of its factors alone, by their names in its file.
        """

    def weights(self) -> Mapping[str, Tensor]:
        """Master weights, float32, full tensors by their names in the checkpoint, a tied one once."""

    def learning_rate(self) -> float:
        """The rate of the next optimizer step."""

    def save(self, path: str) -> None:
        """Write all that training needs to go on, into a new directory."""

    def load(self, path: str) -> None:
        """Go on from `save`, after `build` with the same setup."""

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """Indices of the batches of the first epoch over ``count`` sequences, by the seed that it was built with."""

    def close(self) -> None:
        """End processes, and free memory."""
