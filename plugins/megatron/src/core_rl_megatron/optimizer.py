"""`ShardedOptimizer`: Megatron's optimizer, with its float32 weights, gradients and moments by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import optimizer as upstream
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from core_rl.backend.parameter_rules import ParameterOptions
from core_rl.backend.protocols import MemoryPart
from core_rl.config.engine import OptimizerConfig
from core_rl.toolkit.optimizer import create_moments, set_step_count
from core_rl_megatron.naming import FlatRange

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Owned:
    """Optimizer state of all or a range of one parameter's elements, which this rank updates."""

    parameter: nn.Parameter
    main: Tensor
    """Float32 weights: the parameter itself, a copy, or a range of either."""
    start: int
    """The first element's number in the parameter."""
    moments: Mapping[str, Tensor]

    def values(self, kind: str) -> Tensor:
        """The elements of ``kind``, float32 and flat, in live memory."""
        if kind == "master":
            return self.main.detach().view(-1)
        if kind == "grads":
            grads: Tensor = getattr(self.parameter, "main_grad")  # noqa: B009  Megatron adds the attribute
            return grads.view(-1)[self.start : self.start + self.main.numel()]
        return self.moments[kind].view(-1)


class ShardedOptimizer:
    """Adam over the parameters of ``chunks``, which Megatron's DistributedDataParallel wraps, with moments of 0.

    ``options`` are the settings for each trained parameter. The distributed optimizer gives each data parallel rank a
    range of every parameter's elements, or none. Making one is collective.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: OptimizerConfig,
        options: Mapping[nn.Parameter, ParameterOptions],
        *,
        half: bool,
        distributed: bool,
    ) -> None:
        self._chunks = chunks
        # Without a graph: the distributed optimizer takes views of float32 parameters, which are then leaves.
        with torch.no_grad():
            self._optimizer = _build(chunks, config, options, half=half, distributed=distributed)
        chained = isinstance(self._optimizer, ChainedOptimizer)
        parts = self._optimizer.chained_optimizers if chained else [self._optimizer]
        self._parts = [part for part in parts if not part.is_stub_optimizer]
        """Optimizers of dense parameters and of experts."""
        for part in self._parts:
            # One pass over the memory, and no temporary as large as the weights.
            for group in part.optimizer.param_groups:
                group["fused"] = True
            create_moments(part.optimizer)
        self._owned = {owned.parameter: owned for part in self._parts for owned in _owned_by(part)}
        self._updates = 0

    def flat(self, parameter: nn.Parameter, kind: str) -> FlatRange | None:
        """This rank's elements of ``kind``, float32; None where it has none. No collective."""
        owned = self._owned.get(parameter)
        return None if owned is None else FlatRange(owned.values(kind), owned.start)

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, scale: float, lr: float, count: int) -> None:
        """Multiply the gradients by ``scale`` and make update number ``count``. Collective."""
        grads = [owned.values("grads") for owned in self._owned.values()]
        if scale != 1.0 and grads:  # a stage may be frozen as a whole
            torch._foreach_mul_(grads, scale)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                # Megatron sets both in a scheduler of its own.
                group["lr"] = lr * group["own_lr_factor"]
                group["weight_decay"] = group["own_weight_decay"]
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
                values = owned.values("master")
                parameter.view(-1)[owned.start : owned.start + len(values)].copy_(values)
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def memory(self, part: MemoryPart) -> Iterator[Tensor]:
        """The float32 weights, the buffers of all gradients, or the moments."""
        if part == "gradients":
            for chunk in self._chunks:
                yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
            return
        for owned in self._owned.values():
            yield from (owned.values(kind) for kind in (("master",) if part == "weights" else MOMENTS))


def _build(
    chunks: Sequence[Any],
    config: OptimizerConfig,
    options: Mapping[nn.Parameter, ParameterOptions],
    *,
    half: bool,
    distributed: bool,
) -> Any:
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
    overrides = {
        ParamKey(predicate=ParamPredicate(name=str(setting), fn=partial(_has_options, options, setting))): {
            "own_lr_factor": setting.lr_factor,
            "own_weight_decay": setting.weight_decay,
        }
        for setting in sorted(set(options.values()))
    }
    # Also where TransformerEngine or Apex is installed: their Adam counts steps in another place.
    upstream.USING_PYTORCH_OPTIMIZER = True
    return get_megatron_optimizer(
        plain, list(chunks), config_overrides=overrides, use_gloo_process_groups=False
    )


def _has_options(
    options: Mapping[nn.Parameter, ParameterOptions], setting: ParameterOptions, parameter: nn.Parameter
) -> bool:
    return options[parameter] == setting


def _owned_by(part: Any) -> Iterator[_Owned]:
    """Parameters of an optimizer of Megatron, which has all of each or, if distributed, a range."""
    state = part.optimizer.state
    if not isinstance(part, DistributedOptimizer):
        copied = {model.main_param: model for model in chain(*getattr(part, "float16_groups", ()))}
        for main in chain(*(group["params"] for group in part.optimizer.param_groups)):
            yield _Owned(copied.get(main, main), main, 0, state[main])
        return
    # Not by `model_param_group_index_map`: it miscounts where a group has parameters of two dtypes.
    models = chain(*part.model_fp32_groups, *part.model_float16_groups)
    mains = chain(*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups)
    for model, main in zip(models, mains, strict=True):
        buffer, dtype, bucket = part.model_param_gbuf_map[model]
        owned = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][model]["param"]
        yield _Owned(model, main, owned.start, state[main])
