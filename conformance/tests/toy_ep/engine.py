"""`ExpertParallelEngine`: each rank computes some of the experts, for the tokens of all ranks.

A test double: data parallel ranks are expert parallel ones, and every rank keeps all weights in memory. Tokens
are gathered on all ranks, and what each rank's experts make of them is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import RankAddress
from core_rl.errors import LayoutError
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine
from core_rl.toolkit.packed import PackedModel

__all__ = ["ExpertParallelEngine"]


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
    """The sum over ranks of what each has for all; each gets its own rows, and sends their gradient to all."""

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


class ExpertParallelEngine(HFTrainEngine):
    """Expert ``e`` is computed on rank ``e * ep // experts``; without ``ep``, on every rank for its own tokens."""

    def _groups(self, world: Comm) -> RankGroups:
        self._spread = self.layout.ep > 1
        return RankGroups(data_parallel=Comm(world.group, self.device))

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention()
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=PACKED_ATTENTION)
        count = int(getattr(model.config, "num_experts", 0))
        if self._spread and count % self.layout.ep:
            raise LayoutError(f"ep={self.layout.ep} must divide num_experts={count}")
        nn.Module.to(model, self.device)
        torch.manual_seed(self.config.seed + self.world.rank)
        self._packed = PackedModel(model, self.config.model.head)
        for name, module in model.named_modules():
            if self._spread and name.endswith("mlp.experts"):
                module.forward = partial(self._experts, module, type(module).forward, count)
        self._adopt(model)

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            outputs = self._packed(micro_batch, step.outputs, step.temperature, step.trained_only)
            loss = step(ModelOutput(**outputs), micro_batch)
            if not forward_only:
                loss.backward()

    def _experts(
        self, module: nn.Module, compute: Any, count: int, hidden: Tensor, chosen: Tensor, gates: Tensor
    ) -> Tensor:
        """What the chosen experts make of this rank's tokens ``[T, H]``."""
        group = self.data_parallel_group.group
        assert group is not None  # ep > 1
        length = int(self.data_parallel_group.max([float(len(hidden))])[0])
        tokens = self._gathered(hidden, length, group)
        all_gates = self._gathered(gates, length, group)
        all_chosen = self._gathered(chosen.to(torch.float32), length, group).long()
        here = self._owners(all_chosen, count) == self.world.rank
        flat = tokens.flatten(0, 1)
        own = compute(module, flat, all_chosen.flatten(0, 1), torch.where(here, all_gates, 0.0).flatten(0, 1))
        result: Tensor = _Scattered.apply(own.view_as(tokens), len(hidden), group)  # type: ignore[no-untyped-call]
        return result

    def _gathered(self, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        result: Tensor = _Gathered.apply(rows, length, group)  # type: ignore[no-untyped-call]
        return result

    def _owners(self, experts: Tensor, count: int) -> Tensor:
        """The ranks that compute ``experts``."""
        return experts * self.layout.ep // count

    def _reduce_grads(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._reduce(name, parameter.grad)

    def _reduce(self, name: str, grad: Tensor) -> None:
        """An expert's gradient is whole on the rank that computes it, and 0 elsewhere."""
        dist.all_reduce(grad, group=self.data_parallel_group.group)
