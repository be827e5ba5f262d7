"""A training run from end to end by the float64 oracle, with the errors of plain models.

Only with a large AdamW epsilon: then an update is a smooth function of its gradient, and rounding grows
slowly from step to step. With a small one, noise in tiny gradients decides where the weights go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.inputs.rollouts import Rollouts
from core_rl_oracle.oracle import (
    AdamW,
    OptimizerState,
    Oracle,
    OracleHead,
    OracleSequence,
    Schedule,
    grad_norm,
)
from core_rl_oracle.plain import VARIANTS, PlainModel, Variant
from core_rl_oracle.plain_adamw import KERNELS, Kernel, PlainAdamW
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_oracle.tolerance import Tolerance, scalar_tolerance, tolerances

DataT = TypeVar("DataT", Ragged, Rollouts)
LossT = TypeVar("LossT", CheckLoss, PolicyLoss)


@dataclass(frozen=True, kw_only=True)
class Training(Generic[DataT, LossT]):
    """One optimizer step on each of ``data``; hashable, so that computed values can be cached."""

    data: tuple[DataT, ...]
    loss: LossT
    config: AdamW
    schedule: Schedule

    @property
    def sequences(self) -> list[list[OracleSequence]]:
        return [data.for_oracle() for data in self.data]

    @property
    def rates(self) -> list[float]:
        return [self.config.lr * self.schedule.factor(step) for step in range(len(self.data))]


AnyTraining = Training[Ragged, CheckLoss] | Training[Rollouts, PolicyLoss]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The loss and the pre-clip norm of each training step, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpectedTraining:
    """The float64 trajectory, and the tolerance of each part of it."""

    truth: Trajectory
    losses: list[Tolerance]
    norms: list[Tolerance]
    weights: dict[str, Tolerance]

    def of_step(self, step: int) -> Iterator[tuple[str, str, float, Tolerance]]:
        """Loss and norm of a step: what each is called, its name in reports, the value, and the tolerance."""
        yield "loss", "loss", self.truth.losses[step], self.losses[step]
        yield "norm", "grad_norm", self.truth.norms[step], self.norms[step]


def expected_training(
    directory: Path, head: OracleHead, training: AnyTraining, dtype: torch.dtype, device: str
) -> ExpectedTraining:
    """The oracle's trajectory from the weights in ``directory``; tolerances from every variant of the plain model.

    The plain models compute in ``dtype`` and keep float32 master weights, as engines do.
    """
    oracle = Oracle(directory, head)
    start = OptimizerState.start(oracle.parameters())
    truth = _oracle_training(oracle, start.copy(), training)
    plain = PlainModel(directory, head, dtype, device)
    runs = [
        _plain_training(plain, variant, kernel, start, training, device)
        for variant, kernel in zip(VARIANTS, cycle(KERNELS))
    ]
    return ExpectedTraining(
        truth=truth,
        losses=_of_steps([run.losses for run in runs], truth.losses, dtype),
        norms=_of_steps([run.norms for run in runs], truth.norms, dtype),
        weights=tolerances([run.weights for run in runs], truth.weights, torch.float32),
    )


def _oracle_training(oracle: Oracle, state: OptimizerState, training: AnyTraining) -> Trajectory:
    losses, norms = [], []
    for sequences, rate in zip(training.sequences, training.rates, strict=True):
        oracle.set_parameters(state.params)
        result = oracle.gradients(sequences, training.loss.of_sequence, training.loss.temperature)
        losses.append(result.loss)
        norms.append(training.config.step(state, result.grads, rate))
    return Trajectory(losses=losses, norms=norms, weights=state.params)


def _plain_training(
    plain: PlainModel,
    variant: Variant,
    kernel: Kernel,
    start: OptimizerState,
    training: AnyTraining,
    device: str,
) -> Trajectory:
    optimizer = PlainAdamW(start, training.config, kernel, device)
    losses, norms = [], []
    for sequences, rate in zip(training.sequences, training.rates, strict=True):
        plain.set_weights(optimizer.params)
        loss, grads = plain.gradients(
            variant, sequences, training.loss.of_sequence, training.loss.temperature
        )
        losses.append(loss)
        norms.append(grad_norm(grads))
        scale = training.config.clip_scale(norms[-1])
        optimizer.step({name: grad * scale for name, grad in grads.items()}, rate)
    return Trajectory(losses=losses, norms=norms, weights=optimizer.params)


def _of_steps(
    variants: Sequence[Sequence[float]], expected: Sequence[float], dtype: torch.dtype
) -> list[Tolerance]:
    """The tolerance of a number for each step."""
    return [
        scalar_tolerance([values[step] for values in variants], value, dtype)
        for step, value in enumerate(expected)
    ]
