"""Collectives with a gradient, over the ranks that hold one copy of the model (arXiv:1909.08053, section 3).

All of these ranks compute the same loss, so a value that is equal on all of them has its whole
gradient on each. A value that each rank computes from its own shard has a part of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        parts = [value.new_empty((*value.shape[:-1], size)) for size in sizes]
        parts[ctx.rank].copy_(value)
        for source, part in enumerate(parts):
            # A broadcast for each part: gloo gathers parts of one size only.
            dist.broadcast(part, group=group, group_src=source)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.sizes, dim=-1)[ctx.rank], None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        local_grad: Tensor = value.split(sizes, dim=-2)[dist.get_rank(group)]
        return local_grad.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = []
        for source, size in enumerate(ctx.sizes):
            part = grad.new_empty((*grad.shape[:-2], size, grad.shape[-1]))
            if source == dist.get_rank(ctx.group):
                part.copy_(grad)
            dist.broadcast(part, group=ctx.group, group_src=source)
            parts.append(part)
        return torch.cat(parts, dim=-2), None, None


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def enter(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``value``, equal on all ranks, on its way into shards: each gives back a part of its gradient."""
    result: Tensor = _Enter.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def add_up(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, on every rank; what follows is computed on each, so the gradient passes as it is."""
    result: Tensor = _AddUp.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def gather(value: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """All ranks' ``[..., sizes[rank]]`` along the last dimension; each takes back the gradient of its own part."""
    result: Tensor = _Gather.apply(value, sizes, group)  # type: ignore[no-untyped-call]
    return result


def split_tokens(value: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """This rank's ``[..., sizes[rank], H]`` of ``[..., T, H]``, equal on all; it takes back all ranks' gradients."""
    result: Tensor = _SplitTokens.apply(value, sizes, group)  # type: ignore[no-untyped-call]
    return result


def largest(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The element-wise maximum over ranks, without a gradient."""
    result = value.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=group)
    return result
