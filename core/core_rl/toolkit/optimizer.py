"""AdamW over named parameters, and the state of any torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from core_rl.config.engine import OptimizerConfig

__all__ = ["build_adamw", "create_moments", "decays", "moment_kinds", "set_step_count"]


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ``parameters``, with moments of 0; matrices decay, all others don't.

    A parameter may be a part of the full one, with as many dimensions.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if decays(tuple(p.shape))], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if not decays(tuple(p.shape))], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=True,
    )
    create_moments(optimizer)
    return optimizer


def decays(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this full (Hugging Face) shape decays: matrices do, norms and biases don't."""
    return len(shape) >= 2


@torch.no_grad()
def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that ``optimizer`` otherwise makes in its first step: moments of 0, no step counted.

    It takes a step with a learning rate of 0 and gradients of 0, which changes no weight, as torch's own distributed
    checkpoints do; an optimizer that has state already keeps it.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    set_step_count(optimizer, 0)


def moment_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the optimizer's tensors that have a parameter's shape."""
    for parameter, state in optimizer.state.items():
        return tuple(
            name
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
        )
    return ()


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the step count of all parameters, which bias correction uses, to ``count``."""
    for state in optimizer.state.values():
        if "step" in state:
            step = state["step"]
            state["step"] = step.new_full((), float(count)) if isinstance(step, Tensor) else count
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = count
