"""AdamW in MindSpore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspore import Parameter, Tensor, mint, ops

from core_rl.backend.parameter_rules import ParameterOptions
from core_rl.config.engine import OptimizerConfig

__all__ = ["TrainedWeight", "zeros"]


@dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A weight with its gradient and moments, in float32, and its settings."""

    weight: Parameter
    grad: Parameter
    exp_avg: Parameter
    exp_avg_sq: Parameter
    options: ParameterOptions

    @staticmethod
    def of(name: str, weight: Parameter, options: ParameterOptions) -> TrainedWeight:
        """``weight`` with a gradient and moments of 0."""
        shape = tuple(weight.shape)
        grad, mean, square = (zeros(f"{name}/{kind}", shape) for kind in ("grad", "exp_avg", "exp_avg_sq"))
        return TrainedWeight(weight=weight, grad=grad, exp_avg=mean, exp_avg_sq=square, options=options)

    def step(self, config: OptimizerConfig, scale: float, lr: float, count: int) -> None:
        """Update number ``count``, from 1, by the gradient times ``scale`` (AdamW, arXiv:1711.05101).

        MindSpore's Adam kernel forms ``1 - beta`` in float32, which is 5e-5 off for 0.999. And `Tensor.add_` and
        `Tensor.mul_` of MindSpore 2.10 leave a tensor on the CPU as it is, without an error: only ``assign`` sets it.
        """
        rate, grad = lr * self.options.lr_factor, self.grad * scale
        first, second = config.betas
        mean = _blended(self.exp_avg, grad, first)
        root = mint.sqrt(_blended(self.exp_avg_sq, mint.square(grad), second))
        update = mean / (root / math.sqrt(1 - second**count) + config.eps)
        decayed = self.weight * (1 - rate * self.options.weight_decay)
        ops.assign(self.weight, decayed - update * (rate / (1 - first**count)))


def zeros(name: str, shape: tuple[int, ...]) -> Parameter:
    """A float32 parameter of MindSpore."""
    return Parameter(mint.zeros(shape), name=name)


def _blended(moment: Parameter, value: Tensor, beta: float) -> Tensor:
    """The running mean ``moment`` after one more ``value``."""
    return ops.assign(moment, moment * beta + value * (1 - beta))
