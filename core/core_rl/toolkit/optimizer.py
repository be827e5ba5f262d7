"""The optimizer over the parameters of a module, and the state of any torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core_rl.backend.parameter_rules import ParameterOptions, decays
from core_rl.config.engine import OptimizerConfig
from core_rl.state.gather import buckets
from core_rl.toolkit.eight_bit import AdamW8Bit

__all__ = [
    "MOMENTUM",
    "build_adamw",
    "build_optimizer",
    "create_moments",
    "moment_kinds",
    "moments_of",
    "set_learning_rate",
    "set_step_count",
]

MOMENTUM = "momentum"
"""The kind of Muon's running mean of the gradients."""
GRADIENT_BYTES = 64 * 2**20
"""Of gradients of 0 that `create_moments` has at one time."""


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

    Those of Muon have their momentum in the optimizer's ``state``, and `core_rl.toolkit.muon.Muon` updates them. Raises
    `MissingPackage` where moments of 8 bits are asked for without torchao.
    """
    groups: dict[ParameterOptions, list[nn.Parameter]] = {}
    for parameter, own in options.items():
        groups.setdefault(own, []).append(parameter)
    optimizer = _AdamWNextToOthers(
        [
            {
                "params": groups[own],
                "type": own.type,
                "lr_factor": own.lr_factor,
                "weight_decay": own.weight_decay,
            }
            for own in sorted(groups, reverse=True)  # those that decay come first
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # one pass over the memory, and no temporary as large as the weights
    )
    optimizer.add_eight_bit(config)
    create_moments(optimizer)
    for parameter, own in options.items():
        if own.type == "muon":
            optimizer.state[parameter] = {MOMENTUM: torch.zeros_like(parameter, requires_grad=False)}
    return optimizer


class _AdamWNextToOthers(torch.optim.AdamW):
    """AdamW, whose `step` leaves out the groups of Muon, and gives those of `AdamW8Bit` to it."""

    eight_bit: AdamW8Bit | None = None

    def add_eight_bit(self, config: OptimizerConfig) -> None:
        """Take moments of 8 bits for the groups that ask for them."""
        chosen = [group for group in self.param_groups if group["type"] == "adamw_8bit"]
        if chosen:
            self.eight_bit = AdamW8Bit(chosen, self.state, config)

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
    take `GRADIENT_BYTES` at most, or those of one parameter.
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
    for few in buckets(parameters, (parameter.nbytes for parameter in parameters), GRADIENT_BYTES):
        for parameter in few:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in few:
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
