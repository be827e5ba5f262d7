"""Faults at the edges of numbers: norms and clipping."""

from __future__ import annotations

import torch

from mutants.bases import OwnNorm, Packed
from mutants.zoo import Mutant


@Mutant("I1.gradient-sizes", "a norm of float32 squares", r"the norm of a loss times 2\^-80")
class SquaresInFloat32(OwnNorm):
    """The norm is the root of a float32 sum of squares."""

    def grad_norm(self) -> float:
        squares = [part.tensor.float().square().sum() for part in self.counted() if part.replica == 0]
        return float(torch.stack(squares).sum().sqrt())


@Mutant("I1.gradient-sizes", "a guard against spikes", r"after a step of a loss times 2\^16")
class HalvesLargeSteps(Packed):
    """Updates whose gradients are clipped by more than 1e4 are half as large."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr / 2 if scale < 1e-4 else lr, count)
