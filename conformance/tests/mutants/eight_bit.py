"""Moments of 8 bits that are none, round at the wrong time, or lose a part in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.eight_bit import is_eight_bit
from mutants.bases import TrainContext
from mutants.zoo import C, Mutant

DECLARED = frozenset({C.ADAMW_8BIT})


@Mutant("I20.8bit", "a claim about memory", "more values than 8 bits do", declared=DECLARED)
class EightBitIsFloat32(ReferenceBackend):
    """The moments are float32 after all."""

    def build(self, context: TrainContext) -> None:
        optimizer = context.config.optimizer
        plain = None if optimizer is None else optimizer.model_copy(update={"type": "adamw"})
        config = context.config.model_copy(update={"optimizer": plain})
        super().build(replace(context, config=config))


@Mutant("I20.8bit", "codes of the wrong kind", "exp_avg_sq after step 0", declared=DECLARED)
class EightBitWithSign(ReferenceBackend):
    """Codes of the second moments have a sign, which halves their resolution."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for parameter, state in self.optimizer.state.items() if self.optimizer else ():
            if is_eight_bit(state["exp_avg_sq"]):
                zeros = type(state["exp_avg"]).zeros(parameter.shape, signed=True, dtype=parameter.dtype)
                state["exp_avg_sq"] = zeros


@Mutant("I20.8bit", "moments are rounded before they are used", "weights after step 0", declared=DECLARED)
class EightBitRoundsTooEarly(ReferenceBackend):
    """Weights are updated with the rounded moments."""

    @torch.no_grad()
    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        coded = [p for p in owned if is_eight_bit(self.optimizer.state[p]["exp_avg"])]
        before = [parameter.clone() for parameter in coded]
        super().step(scale, lr, count)
        beta1, beta2 = self.optimizer.defaults["betas"]
        for parameter, start in zip(coded, before, strict=True):
            state = self.optimizer.state[parameter]
            first = state["exp_avg"].dequantize() / (1 - beta1**count)
            root = (state["exp_avg_sq"].dequantize() / (1 - beta2**count)).sqrt()
            decay = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
            start.mul_(1 - lr * decay["weight_decay"])
            parameter.copy_(start - lr * first / (root + self.optimizer.defaults["eps"]))


@Mutant(
    "I11.resume-8bit", "codes without their scales", "exp_avg after the load of 'sharded'", declared=DECLARED
)
class EightBitScalesAreNotSaved(ReferenceBackend):
    """A sharded checkpoint has the codes alone."""

    def opaque_state(self) -> Mapping[str, Tensor]:
        """Without the scales."""
        return {name: value for name, value in super().opaque_state().items() if not name.endswith("/scale")}


"""Mutants that need torchao."""
