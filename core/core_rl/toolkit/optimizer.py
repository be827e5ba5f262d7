"""AdamW over named parameters, with the core's rule of what decays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from core_rl.backend.schedule import decays
from core_rl.config.engine import OptimizerConfig

__all__ = ["build_adamw", "moment", "set_moment", "set_step_count"]

Moment = Literal["exp_avg", "exp_avg_sq"]


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ``parameters``; matrices decay, the rest does not.

    A parameter may be a part of the full one, with as many dimensions.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if decays(tuple(p.shape))], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if not decays(tuple(p.shape))], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=True,
    )


def moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: Moment) -> Tensor:
    """The moment of ``parameter`` (local shards for a DTensor); zeros before its first step."""
    state = optimizer.state.get(parameter, {})
    return state[kind] if kind in state else torch.zeros_like(parameter, requires_grad=False)


def set_moment(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: Moment, value: Tensor
) -> None:
    """Replace the moment of ``parameter``; the rest of its state is made if it is not there yet."""
    state = _prepared(optimizer, parameter)
    with torch.no_grad():
        state[kind].copy_(value)


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Let the bias correction of all parameters stand at ``count`` steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if count or parameter in optimizer.state:
                _prepared(optimizer, parameter)["step"] = torch.tensor(float(count))


def _prepared(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return state
