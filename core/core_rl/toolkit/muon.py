"""Muon on whole matrices of the checkpoint, whichever ranks hold their parts.

The steps are those of `torch.optim.Muon` (torch 2.13, ``torch/optim/_muon.py``): its coefficients, epsilon, Nesterov
momentum and factors of the learning rate. All of it is computed in float32, where torch's Newton-Schulz iterations are
in bfloat16. `torch.optim.Muon` on a shard, or on a parameter that fuses several matrices, is another optimizer: the
orthogonal factor of a part is no part of that of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.backend.parameter_rules import ParameterRules
from core_rl.backend.tensors import LocalSlice, ShardedState
from core_rl.config.engine import MuonConfig
from core_rl.distributed.comm import Comm
from core_rl.state.gather import Gather
from core_rl.state.slices import Placements, gather_placements
from core_rl.toolkit.optimizer import MOMENTUM

__all__ = ["Muon", "adjusted_lr", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration ``a X + b (X X^T) X + c (X X^T)^2 X``."""
EPS = 1e-7
"""The smallest norm that a matrix is divided by."""


@dataclass(frozen=True)
class _Part:
    """A slice of one matrix on this rank, in live memory."""

    momentum: LocalSlice
    weight: Tensor
    grad: Tensor


class Muon:
    """The update of all parameters of ``state`` that have a momentum, float32. Making one is collective.

    Each matrix is gathered on one rank, which orthogonalizes it and sends it to all; ranks take turns.
    """

    def __init__(self, state: ShardedState, rules: ParameterRules, world: Comm) -> None:
        self._state = state
        self._rules = rules
        self._config = rules.config.muon
        self._world = world
        self._placed = gather_placements(state, MOMENTUM, world)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update momentum and weights with the gradients of ``state``, which are clipped already. Collective."""
        parts = self._parts()
        for part in (part for own in parts.values() for part in own):
            part.momentum.tensor.lerp_(part.grad, 1 - self._config.momentum)
        names, size = list(self._placed.shapes), self._world.size
        for start in range(0, len(names), size):
            for name, update in self._updates(names[start : start + size], parts):
                self._apply(name, parts.get(name, ()), update, lr)

    def _parts(self) -> dict[str, list[_Part]]:
        """This rank's slices of each matrix."""
        tensors = {
            kind: {(part.name, part.offsets): part.tensor for part in self._state.local(kind)}
            for kind in ("master", "grads")
        }
        found: dict[str, list[_Part]] = {}
        for momentum in self._state.local(MOMENTUM):
            key = momentum.name, momentum.offsets
            part = _Part(momentum, tensors["master"][key], tensors["grads"][key])
            found.setdefault(momentum.name, []).append(part)
        return found

    def _updates(
        self, names: Sequence[str], parts: Mapping[str, Sequence[_Part]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole orthogonalized matrices ``names``, at most one for each rank, one after another on all ranks."""
        gathered = [self._gathered(name, parts.get(name, ()), rank) for rank, name in enumerate(names)]
        own = [None if whole is None else orthogonalize(whole, self._config.ns_steps) for whole in gathered]
        for rank, name in enumerate(names):
            yield name, self._broadcast(own[rank], name, rank)

    def _gathered(self, name: str, parts: Sequence[_Part], rank: int) -> Tensor | None:
        """The whole momentum (with Nesterov's look ahead) on ``rank``, and None on all others."""
        slices = [replace(part.momentum, tensor=self._direction(part)) for part in parts]
        placed = Placements({name: self._placed.shapes[name]}, {name: self._placed.boxes[name]})
        [(_, whole)] = Gather(world=self._world, writer=rank).stream(placed, slices)
        return whole

    def _direction(self, part: _Part) -> Tensor:
        momentum = part.momentum.tensor
        return part.grad.lerp(momentum, self._config.momentum) if self._config.nesterov else momentum

    def _broadcast(self, whole: Tensor | None, name: str, rank: int) -> Tensor:
        if whole is None:
            whole = torch.empty(self._placed.shapes[name], device=self._world.device)
        whole = whole.contiguous()
        if self._world.size > 1:
            dist.broadcast(whole, group=self._world.group, group_src=rank)
        return whole

    def _apply(self, name: str, parts: Sequence[_Part], update: Tensor, lr: float) -> None:
        shape = self._placed.shapes[name]
        options = self._rules.of(name, shape)
        rate = lr * options.lr_factor
        for part in parts:
            part.weight.mul_(1 - rate * options.weight_decay)
            part.weight.add_(update[part.momentum.region], alpha=-adjusted_lr(rate, self._config, shape))


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations on ``matrix``: its singular vectors stay, and its singular values become nearly 1."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    # In float64: float32 norms of large tensors are off on the CPU.
    x = x / torch.linalg.vector_norm(x, dtype=torch.float64).clamp(min=EPS).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted_lr(lr: float, config: MuonConfig, shape: Sequence[int]) -> float:
    """The learning rate for a matrix of ``shape``."""
    rows, columns = shape
    if config.adjust_lr_fn == "original":
        return lr * math.sqrt(max(1.0, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))
