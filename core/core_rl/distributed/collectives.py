"""Collectives with a gradient, over ranks that hold one copy of a model between them (arXiv:1909.08053).

All of these ranks compute the same loss from the same outputs. A value that is equal on all of them
has its whole gradient on each. A value that each rank made from its own part of the weights has
only a part of its gradient there. The kind of the value decides the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.distributed.comm import Comm

T = TypeVar("T")

# torch 2.11 has them under older names.
all_gather_single: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def add_up(tensors: Sequence[Tensor], comm: Comm, bucket_bytes: int | None = None) -> None:
    """Replace each tensor by its sum over the ranks of ``comm``; all are of one dtype.

    One collective adds up tensors of ``bucket_bytes`` together, by default all of them.
    """
    sizes = [tensor.nbytes for tensor in tensors]
    for bucket in buckets(tensors, sizes, sum(sizes) if bucket_bytes is None else bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=comm.group)
        for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))


def buckets(items: Iterable[T], sizes: Iterable[int], limit: int) -> Iterator[list[T]]:
    """Consecutive ``items`` together up to a sum of their ``sizes`` of ``limit``; a larger one is alone."""
    bucket: list[T] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def copy_to_region(value: Tensor, comm: Comm) -> Tensor:
    """The identity on a ``value`` that is equal on all ranks; the backward pass sums its gradient over the ranks."""
    return _apply(value, comm, lambda tensor: tensor.view_as(tensor), lambda grad: _all_reduce(grad, comm))


def reduce_from_region(value: Tensor, comm: Comm) -> Tensor:
    """The sum over ranks, on every rank. The gradient passes unchanged: all ranks have the whole of it."""
    return _apply(value, comm, lambda part: _all_reduce(part, comm), lambda grad: grad)


def gather(value: Tensor, comm: Comm, dim: int, *, partial: bool) -> Tensor:
    """The ranks' equally large values joined along ``dim``, on every rank.

    With ``partial``, the gradient of the result is a part on each rank: the backward pass adds
    the parts up, and each rank takes its own piece; otherwise it takes its piece of the whole.
    """

    def own_piece(grad: Tensor) -> Tensor:
        return _reduce_scatter(grad, comm, dim) if partial else grad.chunk(comm.size, dim)[comm.rank]

    return _apply(value, comm, lambda piece: _all_gather(piece, comm, dim), own_piece)


def reduce_scatter(value: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's piece, along ``dim``, of the sum over ranks. The backward pass joins the pieces' gradients."""
    return _apply(
        value,
        comm,
        lambda tensor: _reduce_scatter(tensor, comm, dim),
        lambda grad: _all_gather(grad, comm, dim),
    )


def all_to_all(value: Tensor, comm: Comm, split: int, join: int) -> Tensor:
    """All-to-all: ``value`` cut along ``split`` with one piece for each rank, the received ones joined along ``join``.

    A tensor that is whole along ``split`` and a part along ``join`` becomes the reverse (arXiv:2309.14509). The
    backward pass goes the other way round.
    """
    return _apply(
        value,
        comm,
        lambda tensor: _exchange(tensor, comm, split, join),
        lambda grad: _exchange(grad, comm, join, split),
    )


Step: TypeAlias = Callable[[Tensor], Tensor]


class _Collective(torch.autograd.Function):
    """Linear collective, with another collective for its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: Step, backward: Step) -> Tensor:
        ctx.pass_back = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.pass_back(grads[0]), None, None


def _apply(value: Tensor, comm: Comm, forward: Step, backward: Step) -> Tensor:
    if comm.size == 1:
        return value
    result: Tensor = _Collective.apply(value, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _all_reduce(value: Tensor, comm: Comm) -> Tensor:
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=comm.group)
    return result


def _all_gather(value: Tensor, comm: Comm, dim: int) -> Tensor:
    # One tensor for all pieces: a list of them costs a copy in and a copy out.
    piece = value.movedim(dim, 0).contiguous()
    joined = piece.new_empty(comm.size * len(piece), *piece.shape[1:])
    all_gather_single(joined, piece, group=comm.group)
    return joined.movedim(0, dim).contiguous()


def _reduce_scatter(value: Tensor, comm: Comm, dim: int) -> Tensor:
    full = value.movedim(dim, 0).contiguous()
    piece = full.new_empty(len(full) // comm.size, *full.shape[1:])
    reduce_scatter_single(piece, full, group=comm.group)
    return piece.movedim(0, dim).contiguous()


def _exchange(value: Tensor, comm: Comm, split: int, join: int) -> Tensor:
    pieces = torch.stack(value.chunk(comm.size, split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=comm.group)
    return torch.cat(list(received), dim=join)
