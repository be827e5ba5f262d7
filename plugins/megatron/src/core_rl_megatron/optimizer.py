"""`ShardedOptimizer`: Megatron's optimizer, with its float32 weights, gradients and moments by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from core_rl.config.engine import OptimizerConfig
from core_rl.toolkit.optimizer import create_moments, decays, set_step_count
from core_rl_megatron.naming import FlatRange

__all__ = ["MOMENTS", "ShardedOptimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Owned:
    """This rank's optimizer state of one parameter."""

    optimizer: torch.optim.Optimizer
    main: Tensor
    """Float32: the parameter itself, a copy, or elements ``start .. stop - 1`` of either."""
    start: int
    stop: int


class ShardedOptimizer:
    """Adam over the parameters of ``chunks``, which Megatron's DistributedDataParallel wraps, with moments of 0.

    The distributed optimizer gives each data parallel rank a range of every parameter's elements, or none. Making one
    is collective.
    """

    def __init__(
        self, chunks: Sequence[Any], config: OptimizerConfig, *, half: bool, distributed: bool
    ) -> None:
        self._chunks = chunks
        self._weight_decay = config.weight_decay
        # Without a graph: the distributed optimizer takes views of float32 parameters, which are then leaves.
        with torch.no_grad():
            self._optimizer = _build(chunks, config, half=half, distributed=distributed)
        chained = isinstance(self._optimizer, ChainedOptimizer)
        parts = self._optimizer.chained_optimizers if chained else [self._optimizer]
        self._parts = [part for part in parts if not part.is_stub_optimizer]
        """Dense parameters, and those of experts."""
        self._owned: dict[nn.Parameter, _Owned] = {}
        for part in self._parts:
            owned = _ranges(part) if isinstance(part, DistributedOptimizer) else _whole(part)
            self._owned.update(owned)
            create_moments(part.optimizer)
        self._updates = 0

    def flat(self, parameter: nn.Parameter, kind: str) -> FlatRange | None:
        """This rank's elements of ``kind``, float32; None where it has none. No collective."""
        owned = self._owned.get(parameter)
        if owned is None:
            return None
        if kind == "grads":
            values = _main_grad(parameter)[owned.start : owned.stop]
        elif kind == "master":
            values = owned.main.detach().view(-1)
        else:
            values = owned.optimizer.state[owned.main][kind].view(-1)
        return FlatRange(values, owned.start)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, scale: float, lr: float, count: int) -> None:
        """Multiply the gradients by ``scale`` and make update number ``count``. Collective."""
        grads = [_main_grad(parameter)[owned.start : owned.stop] for parameter, owned in self._owned.items()]
        if scale != 1.0 and grads:  # a stage may be frozen as a whole
            torch._foreach_mul_(grads, scale)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr
                # Megatron sets it in a scheduler of its own.
                group["weight_decay"] = self._weight_decay * group["wd_mult"]
            if count != self._updates + 1:
                set_step_count(part.optimizer, count - 1)
            part.prepare_grads()
            part.step_with_ready_grads()
        self._updates = count

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the float32 weights to the parameters of the model, over all data parallel ranks. Collective."""
        for parameter, owned in self._owned.items():
            if owned.main is not parameter:
                parameter.view(-1)[owned.start : owned.stop].copy_(owned.main.view(-1))
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync()

    def mains(self) -> Iterator[Tensor]:
        """The float32 weights."""
        return (owned.main.detach() for owned in self._owned.values())

    def grad_buffers(self) -> Iterator[Tensor]:
        """The memory of all gradients."""
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def moments(self) -> Iterator[Tensor]:
        """All moments."""
        return (owned.optimizer.state[owned.main][kind] for owned in self._owned.values() for kind in MOMENTS)


def _build(chunks: Sequence[Any], config: OptimizerConfig, *, half: bool, distributed: bool) -> Any:
    """Megatron's optimizer. Clipping is off: the core computes the norm of all gradients in float64."""
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


def _main_grad(parameter: nn.Parameter) -> Tensor:
    """The float32 gradient, flat; Megatron adds the attribute."""
    grad: Tensor = getattr(parameter, "main_grad")  # noqa: B009  unknown to nn.Parameter
    return grad.view(-1)


def _whole(part: Any) -> Iterator[tuple[nn.Parameter, _Owned]]:
    """Parameters of an optimizer that has all of each."""
    copies = {
        id(main): model
        for models, mains in zip(
            getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True
        )
        for model, main in zip(models, mains, strict=True)
    }
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield copies.get(id(main), main), _Owned(part.optimizer, main, 0, main.numel())


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, _Owned]]:
    """Parameters of which this rank has a range."""
    # Not by `model_param_group_index_map`: it miscounts where a group has parameters of two dtypes.
    pairs = (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    )
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            for model, main in zip(model_group, main_group, strict=True):
                buffer, dtype, bucket = part.model_param_gbuf_map[model]
                found = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][model]["param"]
                yield model, _Owned(part.optimizer, main, found.start, found.end)
