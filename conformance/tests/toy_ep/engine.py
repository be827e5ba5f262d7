"""`ExpertParallelBackend`: each rank computes some of the experts, for the tokens of all ranks.

A test double: data parallel ranks are expert parallel ones, and every rank keeps all weights in memory. Tokens
are gathered on all ranks, and outputs of each rank's experts are added up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.errors import LayoutError
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.packed import PackedModel


class _Gathered(torch.autograd.Function):
    """All ranks' rows, padded to the longest; each gets back the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, len(rows)
        padded = rows.new_zeros(length, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, padded, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grads[0], ctx.group)[dist.get_rank(ctx.group)][: ctx.rows], None, None


class _Scattered(torch.autograd.Function):
    """The sum over ranks of each rank's values for all; each gets its own rows, and sends their gradient to all."""

    @staticmethod
    def forward(ctx: Any, everything: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, everything.shape
        return _summed(everything, group)[dist.get_rank(group)][:rows].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        everything = grads[0].new_zeros(ctx.shape)
        everything[dist.get_rank(ctx.group)][: len(grads[0])] = grads[0]
        return _summed(everything, ctx.group), None, None


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class ExpertParallelBackend(HFBackend[TrainEngineConfig]):
    """Expert ``e`` is computed on rank ``e * ep // experts``; without ``ep``, on every rank for its own tokens."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        register_packed_attention()
        model_config, ep = context.config.model, context.layout.ep
        model = build_model(model_config, seed=context.seed, attn_implementation=PACKED_ATTENTION)
        count = int(getattr(model.config, "num_experts", 0))
        if count % ep:
            raise LayoutError(f"ep={ep} must divide num_experts={count}")
        nn.Module.to(model, context.device)
        torch.manual_seed(context.seed + context.world.rank)
        self.packed = PackedModel(model, model_config.head)
        for name, module in model.named_modules():
            if ep > 1 and name.endswith("mlp.experts"):
                module.forward = partial(self.experts, module, type(module).forward, count)
        self.adopt(model, context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return ModelOutput(**self.packed(micro_batch, step.outputs, step.temperature, step.trained_only))

    def experts(
        self, module: nn.Module, compute: Any, count: int, hidden: Tensor, expert_ids: Tensor, gates: Tensor
    ) -> Tensor:
        """The outputs of the chosen experts for this rank's tokens ``[T, H]``."""
        world = self.context.world
        group = world.group
        assert group is not None  # ep > 1
        length = int(world.max([float(len(hidden))])[0])
        tokens = self.gathered(hidden, length, group)
        all_gates = self.gathered(gates, length, group)
        all_chosen = self.gathered(expert_ids.to(torch.float32), length, group).long()
        matches = self.owners(all_chosen, count) == world.rank
        flat = tokens.flatten(0, 1)
        local = compute(
            module, flat, all_chosen.flatten(0, 1), torch.where(matches, all_gates, 0.0).flatten(0, 1)
        )
        result: Tensor = _Scattered.apply(local.view_as(tokens), len(hidden), group)  # type: ignore[no-untyped-call]
        return result

    def gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        """The rows of all ranks ``[ranks, length, ...]``."""
        result: Tensor = _Gathered.apply(rows, length, group)  # type: ignore[no-untyped-call]
        return result

    def owners(self, experts: Tensor, count: int) -> Tensor:
        """The ranks that compute ``experts``."""
        return experts * self.context.layout.ep // count

    def reduce_grads(self) -> None:
        for name, grad in self.gradients():
            self.reduce(name, grad)

    def reduce(self, name: str, grad: Tensor) -> None:
        """Add up one gradient; an expert's is whole on the rank that computes it, and 0 elsewhere."""
        dist.all_reduce(grad, group=self.context.groups.data_parallel.group)
