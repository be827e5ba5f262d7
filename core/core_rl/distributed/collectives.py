"""Collectives with a gradient, over ranks that hold one copy of a model between them (arXiv:1909.08053).

All of these ranks compute the same loss from the same outputs. A value that is equal on all of them
has its whole gradient on each. A value that each rank made from its own part of the weights has
only a part of its gradient there. The kind of the value decides the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.distributed.comm import Comm

__all__ = ["all_to_all", "copy_to_region", "gather", "reduce_from_region", "reduce_scatter"]


def copy_to_region(value: Tensor, comm: Comm) -> Tensor:
    """The identity on a ``value`` that is equal on all ranks; the backward pass sums its gradient over the ranks."""
    return value if comm.size == 1 else _apply(_CopyToRegion, value, comm)


def reduce_from_region(value: Tensor, comm: Comm) -> Tensor:
    """The sum over ranks, on every rank. The gradient passes unchanged: all ranks have the whole of it."""
    return value if comm.size == 1 else _apply(_ReduceFromRegion, value, comm)


def gather(value: Tensor, comm: Comm, dim: int, *, partial: bool) -> Tensor:
    """The ranks' equally large values joined along ``dim``, on every rank.

    ``partial`` says that the gradient of the result is a part on each rank: the backward pass adds
    the parts up, and each rank takes its own piece; otherwise it takes its piece of the whole.
    """
    return value if comm.size == 1 else _apply(_Gather, value, comm, dim, partial)


def reduce_scatter(value: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's piece, along ``dim``, of the sum over ranks. The backward pass joins the pieces' gradients."""
    return value if comm.size == 1 else _apply(_ReduceScatter, value, comm, dim)


def all_to_all(value: Tensor, comm: Comm, split: int, join: int) -> Tensor:
    """All-to-all: ``value`` cut along ``split`` with one piece for each rank, the received ones joined along ``join``.

    What was whole along ``split`` and a part along ``join`` becomes the reverse (arXiv:2309.14509). The
    backward pass goes the other way round.
    """
    return value if comm.size == 1 else _apply(_AllToAll, value, comm, split, join)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.comm), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        return _all_reduce(value, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm, dim: int, partial: bool) -> Tensor:
        ctx.comm, ctx.dim, ctx.partial = comm, dim, partial
        return _all_gather(value, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.partial:
            return _reduce_scatter(grads[0], ctx.comm, ctx.dim), None, None, None
        return grads[0].chunk(ctx.comm.size, ctx.dim)[ctx.comm.rank], None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _reduce_scatter(value, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grads[0], ctx.comm, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm, split: int, join: int) -> Tensor:
        ctx.comm, ctx.split, ctx.join = comm, split, join
        return _exchange(value, comm, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.comm, ctx.join, ctx.split), None, None, None


def _all_reduce(value: Tensor, comm: Comm) -> Tensor:
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=comm.group)
    return result


def _all_gather(value: Tensor, comm: Comm, dim: int) -> Tensor:
    own = value.contiguous()
    pieces = [torch.empty_like(own) for _ in range(comm.size)]
    dist.all_gather(pieces, own, group=comm.group)
    return torch.cat(pieces, dim)


def _reduce_scatter(value: Tensor, comm: Comm, dim: int) -> Tensor:
    pieces = [piece.contiguous() for piece in value.chunk(comm.size, dim)]
    result = torch.empty_like(pieces[0])
    dist.reduce_scatter(result, pieces, group=comm.group)
    return result


def _exchange(value: Tensor, comm: Comm, split: int, join: int) -> Tensor:
    pieces = torch.stack(value.chunk(comm.size, split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=comm.group)
    return torch.cat(list(received), dim=join)
