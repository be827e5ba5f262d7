"""Gathering tokens over the ranks that hold parts of the same sequences, with the two gradients that there are.

A value that each rank uses differently (keys and values, for its own queries) has a part of its gradient on each.
A value that all ranks use in the same way (the loss) has the whole gradient on each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, sizes: tuple[int, ...], dim: int, adds: bool, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.dim, ctx.adds, ctx.group = sizes, dim, adds, group
        parts = []
        for source, size in enumerate(sizes):
            part = value.new_empty((*value.shape[:dim], size, *value.shape[dim + 1 :]))
            if source == dist.get_rank(group):
                part.copy_(value)
            # A broadcast for each part: gloo gathers parts of one size only.
            dist.broadcast(part, group=group, group_src=source)
            parts.append(part)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.adds:
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=ctx.group)
        local_grad = grad.split(ctx.sizes, dim=ctx.dim)[dist.get_rank(ctx.group)]
        return local_grad, None, None, None, None


def gather_parts(value: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' ``sizes[rank]`` along ``dim``; the gradients that the ranks have of them are added up."""
    result: Tensor = _Gather.apply(value, sizes, dim, True, group)  # type: ignore[no-untyped-call]
    return result


def gather_tokens(value: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """``[T, ...]`` from all ranks' ``[sizes[rank], ...]``; each takes back the gradient of its own tokens."""
    result: Tensor = _Gather.apply(value, sizes, 0, False, group)  # type: ignore[no-untyped-call]
    return result
