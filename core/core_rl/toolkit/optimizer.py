"""The optimizer over the parameters of a module, and the state of any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_rl.backend.parameter_rules import ParameterOptions, ParameterRules, decays
from core_rl.backend.tensors import LocalSlice, ShardedState
from core_rl.config.engine import MuonConfig, OptimizerConfig
from core_rl.distributed.collectives import buckets
from core_rl.distributed.comm import Comm
from core_rl.state.gather import Gather
from core_rl.state.slices import Placements, gather_placements
from core_rl.toolkit.eight_bit import AdamW8Bit

__all__ = [
    "MOMENTUM",
    "Muon",
    "adjusted_lr",
    "build_adamw",
    "build_optimizer",
    "create_moments",
    "moment_kinds",
    "moments_of",
    "orthogonalize",
    "set_learning_rate",
    "set_step_count",
]

MOMENTUM = "momentum"
"""The kind of Muon's running mean of the gradients."""
GRADIENT_BYTES = 64 * 2**20
"""Limit of the zero gradients of `create_moments` at one time."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration ``a X + b (X X^T) X + c (X X^T)^2 X``."""
EPS = 1e-7
"""The smallest norm that a matrix is divided by."""


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ``parameters``, with moments of 0; matrices decay, all others don't.

    For engines without `Capability.OPTIMIZER_RULES`. A parameter may be a part of the full one, with as many
    dimensions.
    """
    options = {
        parameter: ParameterOptions(
            "adamw", 1.0, config.weight_decay if decays(tuple(parameter.shape)) else 0.0
        )
        for parameter in parameters
        if parameter.requires_grad
    }
    return build_optimizer(options, config)


def build_optimizer(
    options: Mapping[nn.Parameter, ParameterOptions], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW over trainable parameters (or this rank's parts of them) with their ``options``, and moments of 0.

    Parameters of Muon have their momentum in the optimizer's ``state``, and `Muon` updates them. Raises
    `MissingPackage` where moments of 8 bits are asked for without torchao.
    """
    groups: dict[ParameterOptions, list[nn.Parameter]] = {}
    for parameter, setting in options.items():
        groups.setdefault(setting, []).append(parameter)
    optimizer = _AdamWNextToOthers(
        [
            {
                "params": groups[setting],
                "type": setting.type,
                "lr_factor": setting.lr_factor,
                "weight_decay": setting.weight_decay,
            }
            for setting in sorted(groups, reverse=True)  # tensors that decay come first
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # one pass over the memory, and no temporary as large as the weights
    )
    optimizer.add_eight_bit(config)
    create_moments(optimizer)
    for parameter, setting in options.items():
        if setting.type == "muon":
            optimizer.state[parameter] = {MOMENTUM: torch.zeros_like(parameter, requires_grad=False)}
    return optimizer


class _AdamWNextToOthers(torch.optim.AdamW):
    """AdamW, whose `step` leaves out the groups of Muon, and passes 8-bit groups to `AdamW8Bit`."""

    eight_bit: AdamW8Bit | None = None

    def add_eight_bit(self, config: OptimizerConfig) -> None:
        """Take moments of 8 bits for the groups that ask for them."""
        quantized = [group for group in self.param_groups if group["type"] == "adamw_8bit"]
        if quantized:
            self.eight_bit = AdamW8Bit(quantized, self.state, config)

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["type"] == "adamw"]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        if self.eight_bit is not None:
            self.eight_bit.step()
        return loss


@torch.no_grad()
def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that ``optimizer`` otherwise makes in its first step: moments of 0, no step counted.

    It takes steps with a learning rate of 0 and gradients of 0, which change no weight, as torch's own distributed
    checkpoints do; an optimizer that has state already keeps it. Each step is of a few parameters, so that gradients
    take `GRADIENT_BYTES` at most, or one parameter.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = None
    for bucket in buckets(parameters, (parameter.nbytes for parameter in parameters), GRADIENT_BYTES):
        for parameter in bucket:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in bucket:
            parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    set_step_count(optimizer, 0)


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """Names of the optimizer's tensors for ``parameter`` that have its shape; none where it has no state."""
    state = optimizer.state.get(parameter, {})
    return tuple(
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
    )


def moment_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the optimizer's tensors that have the shape of their parameter."""
    kinds = (kind for parameter in optimizer.state for kind in moments_of(optimizer, parameter))
    return tuple(dict.fromkeys(kinds))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group ``lr``, times its ``lr_factor`` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the step count of all parameters, which bias correction uses, to ``count``."""
    for state in optimizer.state.values():
        if "step" in state:
            step = state["step"]
            state["step"] = step.new_full((), float(count)) if isinstance(step, Tensor) else count
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = count


@dataclass(frozen=True)
class _Part:
    """A slice of one matrix on this rank, in live memory."""

    momentum: LocalSlice
    weight: Tensor
    grad: Tensor


class Muon:
    """The update of all parameters of ``state`` that have a momentum, float32. Making one is collective.

    Each matrix is gathered on one rank, which orthogonalizes it and sends it to all, rank after rank.
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
        for part in (part for slices in parts.values() for part in slices):
            part.momentum.tensor.lerp_(part.grad, 1 - self._config.momentum)
        names, size = list(self._placed.shapes), self._world.size
        for start in range(0, len(names), size):
            for name, update in self._updates(names[start : start + size], parts):
                self._apply(name, parts.get(name, ()), update, lr)

    def _parts(self) -> dict[str, list[_Part]]:
        tensors = {
            kind: {(part.name, part.offsets): part.tensor for part in self._state.local(kind)}
            for kind in ("master", "grads")
        }
        slices: dict[str, list[_Part]] = {}
        for momentum in self._state.local(MOMENTUM):
            key = momentum.name, momentum.offsets
            part = _Part(momentum, tensors["master"][key], tensors["grads"][key])
            slices.setdefault(momentum.name, []).append(part)
        return slices

    def _updates(
        self, names: Sequence[str], parts: Mapping[str, Sequence[_Part]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole orthogonalized matrices ``names``, at most one for each rank, in the same order on all ranks."""
        gathered = [self._gathered(name, parts.get(name, ()), rank) for rank, name in enumerate(names)]
        updates = [
            None if matrix is None else orthogonalize(matrix, self._config.ns_steps) for matrix in gathered
        ]
        for rank, name in enumerate(names):
            yield name, self._broadcast(updates[rank], name, rank)

    def _gathered(self, name: str, parts: Sequence[_Part], rank: int) -> Tensor | None:
        """The whole momentum (with Nesterov's look ahead) on ``rank``, and None on all others."""
        slices = [replace(part.momentum, tensor=self._direction(part)) for part in parts]
        placed = Placements({name: self._placed.shapes[name]}, {name: self._placed.boxes[name]})
        [(_, matrix)] = Gather(world=self._world, writer=rank).stream(placed, slices)
        return matrix

    def _direction(self, part: _Part) -> Tensor:
        momentum = part.momentum.tensor
        return part.grad.lerp(momentum, self._config.momentum) if self._config.nesterov else momentum

    def _broadcast(self, matrix: Tensor | None, name: str, rank: int) -> Tensor:
        if matrix is None:
            matrix = torch.empty(self._placed.shapes[name], device=self._world.device)
        matrix = matrix.contiguous()
        if self._world.size > 1:
            dist.broadcast(matrix, group=self._world.group, group_src=rank)
        return matrix

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
