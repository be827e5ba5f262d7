"""Rounding of torch's own AdamW in float32, and of moments of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from core_rl_oracle.oracle import AdamW, OptimizerState, grad_norm
from core_rl_oracle.plain import nudged
from core_rl_oracle.tolerance import FLOOR_ULPS, Tolerance, tolerances

Kernel = Literal["foreach", "loop", "fused"]
KERNELS: tuple[Kernel, ...] = ("foreach", "loop", "fused")
VARIANTS: tuple[tuple[Kernel, int | None], ...] = (
    ("foreach", None),
    ("loop", None),
    ("fused", None),
    ("foreach", 1),
    ("loop", 2),
)
"""Kernels, and seeds of moving gradients by one unit in the last place.

On CUDA the fused kernel rounds betas to float32 (pytorch/pytorch#173224), and its error of ``1 - beta`` with them.
"""
LARGEST_ERROR = {"exp_avg": 0.9 / 64 / 2, "exp_avg_sq": 0.9 / 128 / 2}
"""Error of each kind of moments, in relation to the largest magnitude of the block.

The dynamic data type of Dettmers et al. (arXiv:2110.02861, section 2.2) divides each block by its largest magnitude.
Its codes are widest apart in the last decade, from 0.1 to 1: that has 64 of them for numbers with a sign, and 128 for
others. A number is at most half of their distance from its code.
"""


def step_tolerances(
    start: OptimizerState,
    expected: OptimizerState,
    config: AdamW,
    grads: Sequence[Mapping[str, Tensor]],
    rates: Sequence[float],
    device: str = "cpu",
) -> dict[str, dict[str, Tolerance]]:
    """The tolerances of ``params``, ``exp_avg`` and ``exp_avg_sq`` after the steps from ``start`` to ``expected``.

    The steps have ``grads`` and learning ``rates``, and the plain optimizer makes them on ``device``.
    """
    runs = []
    for kernel, nudge in VARIANTS:
        optimizer = PlainAdamW(start, config, kernel, device)
        for number, (step_grads, rate) in enumerate(zip(grads, rates, strict=True)):
            scale = config.clip_scale(grad_norm(step_grads))
            values = {
                name: grad.float() if nudge is None else _nudged(grad, nudge, number)
                for name, grad in step_grads.items()
            }
            optimizer.step({name: grad * scale for name, grad in values.items()}, rate)
        runs.append(optimizer.state)
    return {
        kind: tolerances([getattr(run, kind) for run in runs], getattr(expected, kind), torch.float32)
        for kind in ("params", "exp_avg", "exp_avg_sq")
    }


class PlainAdamW:
    """torch's AdamW over float32 copies of the weights and moments of ``start``, which are on ``device``."""

    def __init__(
        self, start: OptimizerState, config: AdamW, kernel: Kernel = "foreach", device: str = "cpu"
    ) -> None:
        self._params = {
            name: torch.nn.Parameter(_float32(value, device)) for name, value in start.params.items()
        }
        self._optimizer = _optimizer(self._params, config, kernel)
        for name, parameter in self._params.items():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(start.count), device=device),
                "exp_avg": _float32(start.exp_avg[name], device),
                "exp_avg_sq": _float32(start.exp_avg_sq[name], device),
            }

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights, as they are now."""
        return {name: parameter.detach().cpu() for name, parameter in self._params.items()}

    @property
    def state(self) -> OptimizerState:
        """Weights and moments, as they are now."""
        parts = {name: self._optimizer.state[parameter] for name, parameter in self._params.items()}
        return OptimizerState(
            params=self.params,
            exp_avg={name: part["exp_avg"].cpu() for name, part in parts.items()},
            exp_avg_sq={name: part["exp_avg_sq"].cpu() for name, part in parts.items()},
        )

    def step(self, grads: Mapping[str, Tensor], rate: float) -> None:
        """One step with ``grads``, which are clipped already; parameters without one stay."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for name, grad in grads.items():
            self._params[name].grad = grad.to(self._params[name].device)
        self._optimizer.step()


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


def _float32(value: Tensor, device: str) -> Tensor:
    return value.to(device, torch.float32, copy=True)


def _nudged(grad: Tensor, seed: int, step: int) -> Tensor:
    return nudged(grad.float(), torch.Generator().manual_seed(1000 * seed + step))


def with_rounding_to_codes(
    kind: str, exact: Mapping[str, Tensor], allowed: Mapping[str, Tolerance]
) -> dict[str, Tolerance]:
    """``allowed``, and the largest error of codes for ``exact``; which block an element is in is up to an engine."""
    # A number halfway between two codes is as far as that, and rounds in float32.
    share = LARGEST_ERROR[kind] + FLOOR_ULPS * torch.finfo(torch.float32).eps
    return {
        name: allowed[name] + Tolerance(baseline=0.0, floor=share * float(value.abs().max()))
        for name, value in exact.items()
    }


def share_of_values(moment: Tensor) -> float:
    """Different values for each element that is not 0: near 1 in float32; codes repeat in each block."""
    values = moment[moment != 0]
    return len(values.unique()) / max(1, len(values))
