"""Steps of Muon and AdamW side by side, with settings for each parameter: in float64, and in float32 for tolerances.

Muon is that of `torch.optim.Muon` (torch 2.13), which follows https://kellerjordan.github.io/posts/muon/, here on whole
matrices of the checkpoint. ``match_rms_adamw`` is from arXiv:2502.16982.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from core_rl_oracle.oracle import KINDS, AdamW, OptimizerState, grad_norm
from core_rl_oracle.plain import nudged
from core_rl_oracle.tolerance import Tolerance, tolerances

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
Matrices = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for one parameter."""

    muon: bool = False
    lr_factor: float = 1.0
    weight_decay: float = 0.0


def hidden_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon is for this parameter: a matrix in a layer, whose number is in its name."""
    return value.dim() == 2 and any(re.fullmatch(r"\d+", part) for part in name.split("."))


def newton_schulz(matrix: Tensor, steps: int, *, transposed: bool = False) -> Tensor:
    """The iterations on ``matrix``; ``transposed`` computes the same from the other side, where it is square."""
    rows, columns = matrix.shape
    flipped = rows > columns or (rows == columns and transposed)
    x = matrix.T if flipped else matrix
    x = x / max(math.sqrt(float(x.double().square().sum())), EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + B * (gram @ x) + C * (gram @ (gram @ x))
    return x.T if flipped else x


def rate_factor(config: MixedOptimizer, matrix: Tensor) -> float:
    """The factor of the learning rate for a matrix of this shape."""
    rows, columns = matrix.shape
    if config.adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def scaled(config: MixedOptimizer, matrix: Tensor) -> Tensor:
    """The update of a matrix, times its factor of the learning rate."""
    return rate_factor(config, matrix) * newton_schulz(matrix, config.ns_steps, transposed=config.transposed)


def each_alone(config: MixedOptimizer, matrices: Matrices) -> dict[str, Tensor]:
    """The update of each matrix of the checkpoint, as a whole."""
    return {name: scaled(config, matrix) for name, matrix in matrices.items()}


@dataclass(frozen=True, kw_only=True)
class MixedOptimizer:
    """Muon for some matrices, and AdamW for all other parameters."""

    adamw: AdamW
    """Learning rate, clipping, and the fields of AdamW; its ``weight_decay`` is not read."""
    settings: Mapping[str, Settings]
    """Settings of every parameter."""
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    updates: Callable[[MixedOptimizer, Matrices], Mapping[str, Tensor]] = each_alone
    """The update of all matrices."""
    transposed: bool = False
    dtype: torch.dtype = torch.float64

    def step(self, state: OptimizerState, grads: Mapping[str, Tensor], lr: float) -> float:
        """Update ``state`` in place with ``grads`` and the learning rate ``lr``; returns their norm before clipping."""
        norm = grad_norm(grads)
        scale = self.adamw.clip_scale(norm)
        state.count += 1
        clipped = {name: value.to(self.dtype) * scale for name, value in grads.items()}
        directions = {}
        for name, grad in clipped.items():
            setting = self.settings[name]
            state.params[name].mul_(1 - lr * setting.lr_factor * setting.weight_decay)
            if setting.muon:
                directions[name] = self._direction(state.momentum[name], grad)
            else:
                self._adam(state, name, grad, lr * setting.lr_factor)
        for name, update in self.updates(self, directions).items():
            state.params[name].sub_(lr * self.settings[name].lr_factor * update)
        return norm

    def _direction(self, momentum: Tensor, grad: Tensor) -> Tensor:
        momentum.mul_(self.momentum).add_(grad * (1 - self.momentum))
        return self.momentum * momentum + (1 - self.momentum) * grad if self.nesterov else momentum.clone()

    def _adam(self, state: OptimizerState, name: str, grad: Tensor, lr: float) -> None:
        beta1, beta2 = self.adamw.betas
        first = state.exp_avg[name].mul_(beta1).add_(grad * (1 - beta1))
        second = state.exp_avg_sq[name].mul_(beta2).add_(grad * grad * (1 - beta2))
        unbiased = (second / (1 - beta2**state.count)).sqrt()
        state.params[name].sub_(lr * (first / (1 - beta1**state.count)) / (unbiased + self.adamw.eps))


def mixed_tolerances(
    start: OptimizerState,
    expected: OptimizerState,
    config: MixedOptimizer,
    grads: Sequence[Mapping[str, Tensor]],
    rates: Sequence[float],
) -> dict[str, dict[str, Tolerance]]:
    """The tolerances of each of `KINDS` after the steps from ``start`` to ``expected``."""
    runs = []
    for transposed, nudge in ((False, None), (True, None), (False, 1), (True, 2), (False, 3)):
        plain = replace(config, dtype=torch.float32, transposed=transposed)
        state = start.copy(torch.float32)
        for number, (step_grads, rate) in enumerate(zip(grads, rates, strict=True)):
            plain.step(
                state, step_grads if nudge is None else _nudged(step_grads, 1000 * nudge + number), rate
            )
        runs.append(state)
    return {
        kind: tolerances([getattr(run, kind) for run in runs], getattr(expected, kind), torch.float32)
        for kind in KINDS
    }


def _nudged(grads: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nudged(grad.float(), generator) for name, grad in grads.items()}
