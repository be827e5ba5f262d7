"""torch's own AdamW in float32: how much rounding of optimizer steps is nobody's fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core_rl_conformance.oracle import AdamW, AdamWState, grad_norm
from core_rl_conformance.tolerance import Tolerance, tolerances

__all__ = ["StepTolerances", "step_tolerances"]

Kernel = Literal["foreach", "loop", "fused"]
VARIANTS: tuple[tuple[Kernel, int | None], ...] = (
    ("foreach", None),
    ("loop", None),
    ("fused", None),
    ("foreach", 1),
    ("loop", 2),
)
"""Kernels, and seeds of moving gradients by one unit in the last place."""


@dataclass(frozen=True, kw_only=True)
class StepTolerances:
    """Of weights and both moments, by name."""

    master: dict[str, Tolerance]
    exp_avg: dict[str, Tolerance]
    exp_avg_sq: dict[str, Tolerance]


def step_tolerances(
    start: AdamWState,
    expected: AdamWState,
    config: AdamW,
    grads: Sequence[Mapping[str, Tensor]],
    rates: Sequence[float],
) -> StepTolerances:
    """The tolerances after the steps from ``start`` to ``expected`` with ``grads`` and learning ``rates``."""
    runs = [_run(start, config, grads, rates, kernel, nudge) for kernel, nudge in VARIANTS]
    return StepTolerances(
        master=tolerances([run.params for run in runs], expected.params, torch.float32),
        exp_avg=tolerances([run.exp_avg for run in runs], expected.exp_avg, torch.float32),
        exp_avg_sq=tolerances([run.exp_avg_sq for run in runs], expected.exp_avg_sq, torch.float32),
    )


def _run(
    start: AdamWState,
    config: AdamW,
    grads: Sequence[Mapping[str, Tensor]],
    rates: Sequence[float],
    kernel: Kernel,
    nudge: int | None,
) -> AdamWState:
    params = {name: torch.nn.Parameter(value.float()) for name, value in start.params.items()}
    optimizer = _optimizer(params, config, kernel)
    for name, parameter in params.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(start.count)),
            "exp_avg": start.exp_avg[name].float(),
            "exp_avg_sq": start.exp_avg_sq[name].float(),
        }
    for number, (step_grads, rate) in enumerate(zip(grads, rates, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        scale = config.clip_scale(grad_norm(step_grads))
        for name, grad in step_grads.items():
            params[name].grad = (
                _nudged(grad, nudge, number) if nudge is not None else grad.float().clone()
            ) * scale
        optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in params.items()}
    return AdamWState(
        params={name: parameter.detach() for name, parameter in params.items()},
        exp_avg={name: part["exp_avg"] for name, part in state.items()},
        exp_avg_sq={name: part["exp_avg_sq"] for name, part in state.items()},
    )


def _optimizer(params: Mapping[str, torch.nn.Parameter], config: AdamW, kernel: Kernel) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=kernel == "foreach",
        fused=kernel == "fused",
    )


def _nudged(grad: Tensor, seed: int, step: int) -> Tensor:
    up = torch.rand(grad.shape, generator=torch.Generator().manual_seed(1000 * seed + step)) < 0.5
    return torch.nextafter(grad.float(), torch.where(up, torch.inf, -torch.inf))
