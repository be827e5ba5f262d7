"""Training runs of several steps without an export before the end, with the oracle's trajectory.

With a large epsilon an update is a smooth function of its gradient, so that the whole way can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import optimizer_config
from core_rl_conformance.trajectory import ExpectedTraining, Training
from core_rl_oracle.oracle import AdamW

__all__ = ["Trained", "expected_training", "train_end_to_end", "training_of", "verify_rates"]

LOSS = TokenMeanLoss(temperature=0.8)
CUT = MicroBatchSpec(max_tokens=48)
BATCHES = (0, 1, 0, 2)
"""The batch of each step; one comes again, as in a second epoch."""
CONFIG = AdamW(lr=0.2, betas=(0.8, 0.95), eps=0.1, weight_decay=0.01, max_grad_norm=0.5)
"""With a large epsilon, and clipping in every step."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The reports of the training steps, and the weights at the end."""

    reports: list[dict[str, float]]
    weights: dict[str, Tensor]


def training_of(subject: EngineUnderTest) -> Training:
    """One step on each of several batches, with clipping and a learning rate that falls."""
    return Training(
        data=tuple(subject.data(PROBE, seed) for seed in BATCHES),
        loss=LOSS,
        config=CONFIG,
        total_steps=len(BATCHES) + 2,
    )


def expected_training(subject: EngineUnderTest, training: Training) -> ExpectedTraining:
    """The oracle's values for ``training``, with tolerances."""
    return subject.expected.training(subject.model(), training, subject.dtype, subject.case.device)


def train_end_to_end(side: EngineUnderTest, training: Training) -> Trained:
    """The engine of ``side`` goes through ``training``; its weights are looked at only at the end."""
    optimizer = optimizer_config(training.config, training.total_steps)
    group = side.start(side.model(), optimizer=optimizer)
    reports = []
    for step, data in enumerate(training.data):
        reports.append(group.train_batch(data.batch(), training.loss.spec(), CUT))
        side.require(
            reports[-1]["update_successful"] == 1.0, f"the update of step {step} was not made: {reports[-1]}"
        )
        group.lr_scheduler_step()
    return Trained(reports=reports, weights=group.named_tensors("master"))


def verify_rates(subject: EngineUnderTest, training: Training, trained: Trained) -> None:
    """Require that each step reports the learning rate of the schedule."""
    for step, (report, rate) in enumerate(zip(trained.reports, training.rates, strict=True)):
        subject.require(
            abs(report["lr"] - rate) <= 1e-12 * training.config.lr,
            f"step {step} reports the learning rate {report['lr']}; the schedule has {rate}",
        )
