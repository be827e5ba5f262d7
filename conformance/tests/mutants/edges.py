"""Faults at the edges of numbers: norms and clipping."""

from __future__ import annotations

import torch

from mutants.bases import OwnNorm, Packed
from mutants.zoo import Mutant


class SquaresInFloat32(OwnNorm):
    """The norm is the root of a float32 sum of squares."""

    def grad_norm(self) -> float:
        squares = [part.tensor.float().square().sum() for part in self.counted() if part.replica == 0]
        return float(torch.stack(squares).sum().sqrt())


class HalvesLargeSteps(Packed):
    """Updates whose gradients are clipped by more than 1e4 are half as large."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr / 2 if scale < 1e-4 else lr, count)


MUTANTS = (
    Mutant(
        engine=SquaresInFloat32,
        killed_by="I1.gradient-sizes",
        issue="a norm of float32 squares",
        says=r"the norm of a loss times 2\^-80",
    ),
    Mutant(
        engine=HalvesLargeSteps,
        killed_by="I1.gradient-sizes",
        issue="a guard against spikes",
        says=r"after a step of a loss times 2\^16",
    ),
)
