"""Collectives with a gradient, over ranks that hold one copy of a model between them (arXiv:1909.08053).

All of these ranks compute the same loss from the same outputs. A value that is equal on all of them
therefore has its whole gradient on each, and a value that each rank made from its own part of the
weights has a part of its gradient there. Which of the two a value is decides what its backward
pass does, and every function here says so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.distributed.comm import World

__all__ = ["add_up", "enter", "gather", "scatter_sum", "swap"]


def enter(value: Tensor, world: World) -> Tensor:
    """``value``, equal on all ranks, on its way into their parts of the weights.

    The backward pass adds up the ranks' parts of its gradient.
    """
    return value if world.size == 1 else _apply(_Enter, value, world)


def add_up(value: Tensor, world: World) -> Tensor:
    """The sum over ranks, on every rank. The gradient passes as it is: all ranks have the whole."""
    return value if world.size == 1 else _apply(_AddUp, value, world)


def gather(value: Tensor, world: World, dim: int, *, partial: bool) -> Tensor:
    """The ranks' equally large values joined along ``dim``, on every rank.

    ``partial`` says that the gradient of the result is a part on each rank: the backward pass adds
    the parts up, and each rank takes its own piece; otherwise it takes its piece of the whole.
    """
    return value if world.size == 1 else _apply(_Gather, value, world, dim, partial)


def scatter_sum(value: Tensor, world: World, dim: int) -> Tensor:
    """This rank's piece, along ``dim``, of the sum over ranks. The backward pass joins the pieces' gradients."""
    return value if world.size == 1 else _apply(_ScatterSum, value, world, dim)


def swap(value: Tensor, world: World, split: int, join: int) -> Tensor:
    """All-to-all: ``value`` cut along ``split`` with one piece for each rank, the received ones joined along ``join``.

    What was whole along ``split`` and a part along ``join`` becomes the reverse (arXiv:2309.14509). The
    backward pass goes the other way round.
    """
    return value if world.size == 1 else _apply(_Swap, value, world, split, join)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World) -> Tensor:
        ctx.world = world
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.world), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World) -> Tensor:
        return _sum(value, world)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World, dim: int, partial: bool) -> Tensor:
        ctx.world, ctx.dim, ctx.partial = world, dim, partial
        return _join(value, world, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.partial:
            return _piece_of_sum(grads[0], ctx.world, ctx.dim), None, None, None
        return grads[0].chunk(ctx.world.size, ctx.dim)[ctx.world.rank], None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World, dim: int) -> Tensor:
        ctx.world, ctx.dim = world, dim
        return _piece_of_sum(value, world, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _join(grads[0], ctx.world, ctx.dim), None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World, split: int, join: int) -> Tensor:
        ctx.world, ctx.split, ctx.join = world, split, join
        return _swapped(value, world, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _swapped(grads[0], ctx.world, ctx.join, ctx.split), None, None, None


def _sum(value: Tensor, world: World) -> Tensor:
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=world.group)
    return result


def _join(value: Tensor, world: World, dim: int) -> Tensor:
    own = value.contiguous()
    pieces = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(pieces, own, group=world.group)
    return torch.cat(pieces, dim)


def _piece_of_sum(value: Tensor, world: World, dim: int) -> Tensor:
    pieces = [piece.contiguous() for piece in value.chunk(world.size, dim)]
    result = torch.empty_like(pieces[0])
    dist.reduce_scatter(result, pieces, group=world.group)
    return result


def _swapped(value: Tensor, world: World, split: int, join: int) -> Tensor:
    pieces = torch.stack(value.chunk(world.size, split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=world.group)
    return torch.cat(list(received), dim=join)
