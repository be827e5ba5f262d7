"""Megatron's optimizer, and its float32 weights and moments by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from core_rl.backend.schedule import decays
from core_rl.config.engine import OptimizerConfig
from core_rl.toolkit.optimizer import moment, set_moment, set_step_count

__all__ = ["OptimizerState", "Owned", "build_optimizer"]

Quantity = Literal["master", "grads", "exp_avg", "exp_avg_sq"]


def build_optimizer(
    chunks: Sequence[nn.Module], config: OptimizerConfig, *, half: bool, distributed: bool
) -> Any:
    """Megatron's optimizer over ``chunks``, which its DistributedDataParallel wraps. Collective.

    Clipping is off: the core computes the norm of all gradients in float64, and scales them.
    """
    plain = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=distributed,
        clip_grad=0.0,
    )
    undecayed = ParamKey(predicate=ParamPredicate(name="undecayed", fn=lambda p: not decays(tuple(p.shape))))
    return get_megatron_optimizer(
        plain, list(chunks), config_overrides={undecayed: {"wd_mult": 0.0}}, use_gloo_process_groups=False
    )


@dataclass(frozen=True, eq=False)
class Owned:
    """What this rank's optimizer has of one parameter."""

    optimizer: torch.optim.Optimizer
    main: nn.Parameter
    """Float32: the parameter itself, a copy, or elements ``start .. stop - 1`` of either."""
    start: int
    stop: int


class OptimizerState:
    """Reads and sets what the optimizer holds of each parameter, in the parameter's shape.

    The distributed optimizer spreads a parameter over data parallel ranks; for it, reading is collective
    over these, and all of them ask for the same parameters in the same order.
    """

    def __init__(self, optimizer: Any, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self._weight_decay = config.weight_decay
        self._owned: dict[nn.Parameter, Owned] = {}
        self._groups: dict[nn.Parameter, dist.ProcessGroup] = {}
        for part in self.parts():
            if isinstance(part, DistributedOptimizer):
                self._take_spread(part)
            else:
                self._take_whole(part)

    def parts(self) -> Iterator[Any]:
        """The optimizers that have parameters: dense ones, and those of experts."""
        chained = isinstance(self.optimizer, ChainedOptimizer)
        for part in self.optimizer.chained_optimizers if chained else (self.optimizer,):
            if not part.is_stub_optimizer:
                yield part

    def owned(self, parameter: nn.Parameter) -> Owned | None:
        """What this rank has of ``parameter``; None where it has nothing."""
        return self._owned.get(parameter)

    def is_spread(self, parameter: nn.Parameter) -> bool:
        """Whether data parallel ranks have a part each."""
        return parameter in self._groups

    def read(self, parameter: nn.Parameter, kind: Quantity) -> Tensor:
        """``kind`` of all of this rank's ``parameter``, float32."""
        owned = self._owned.get(parameter)
        own = None if owned is None else self._own(parameter, owned, kind)
        if parameter not in self._groups:
            assert own is not None  # a trained parameter, of which this rank has all
            return own.view(parameter.shape)
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if owned is not None and own is not None:
            full[owned.start : owned.stop] = own
        dist.all_reduce(full, group=self._groups[parameter])
        return full.view(parameter.shape)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, kind: Quantity, value: Tensor) -> None:
        """Set ``kind`` from a ``value`` in the shape of ``parameter``. No collective."""
        owned = self._owned.get(parameter)
        if owned is None:
            return
        own = value.reshape(-1)[owned.start : owned.stop].view(owned.main.shape)
        if kind == "exp_avg" or kind == "exp_avg_sq":
            set_moment(owned.optimizer, owned.main, kind, own)
        else:
            owned.main.data.copy_(own)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parts of reduced gradients that this rank's optimizer works on, flat."""
        for parameter, owned in self._owned.items():
            main_grad: Tensor = getattr(parameter, "main_grad")  # noqa: B009  set by Megatron
            yield parameter, main_grad.view(-1)[owned.start : owned.stop]

    def set_lr(self, lr: float) -> None:
        """Use ``lr``; and the weight decay, which Megatron sets only in a scheduler of its own."""
        for group in self._param_groups():
            group["lr"] = lr
            group["weight_decay"] = self._weight_decay * group["wd_mult"]

    def step(self, scale: float) -> None:
        """Multiply the gradients by ``scale`` and update the weights."""
        if scale != 1.0 and self._owned:  # a stage may be frozen as a whole
            torch._foreach_mul_([grad for _, grad in self.gradients()], scale)
        for part in self.parts():
            part.prepare_grads()
            part.step_with_ready_grads()

    def set_update_count(self, count: int) -> None:
        """Let Adam's bias correction stand at ``count`` steps."""
        for part in self.parts():
            if isinstance(part.optimizer, torch.optim.AdamW):
                set_step_count(part.optimizer, count)
                continue
            for group in part.optimizer.param_groups:
                group["step"] = count  # TransformerEngine's and Apex's Adam count for each group

    def moments(self) -> Iterator[Tensor]:
        """All moments that there are."""
        for part in self.parts():
            for state in part.optimizer.state.values():
                yield from (value for name, value in state.items() if name != "step")

    def mains(self) -> Iterator[Tensor]:
        """The float32 weights that the optimizer updates."""
        return (owned.main for owned in self._owned.values())

    def _param_groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts():
            yield from part.optimizer.param_groups

    def _own(self, parameter: nn.Parameter, owned: Owned, kind: Quantity) -> Tensor:
        if kind == "master":
            return owned.main.detach()
        if kind == "grads":
            main_grad: Tensor = getattr(parameter, "main_grad")  # noqa: B009  set by Megatron
            return main_grad.view(-1)[owned.start : owned.stop]
        return moment(owned.optimizer, owned.main, kind)

    def _take_whole(self, part: Any) -> None:
        half = [
            pair
            for models, mains in zip(
                getattr(part, "float16_groups", ()),
                getattr(part, "fp32_from_float16_groups", ()),
                strict=True,
            )
            for pair in zip(models, mains, strict=True)
        ]
        copies = {id(main): model for model, main in half}
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                model = copies.get(id(main), main)
                self._owned[model] = Owned(part.optimizer, main, 0, main.numel())

    def _take_spread(self, part: DistributedOptimizer) -> None:
        for buffer in part.buffers:
            for parameter in buffer.params:
                self._groups[parameter] = part.data_parallel_group
        # Not by `model_param_group_index_map`: it miscounts where a group has parameters of two dtypes.
        pairs = (
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        )
        for models, mains in pairs:
            for model_group, main_group in zip(models, mains, strict=True):
                for model, main in zip(model_group, main_group, strict=True):
                    place = part._get_model_param_range_map(model)["param"]
                    self._owned[model] = Owned(part.optimizer, main, place.start, place.end)
