"""Full tensors out of the slices of all ranks, a bucket of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.tensors import LocalSlice, box_region
from core_rl.distributed.collectives import buckets
from core_rl.distributed.comm import Comm
from core_rl.state.slices import Box, Placements

BUCKET_BYTES = 32 * 2**20
"""Pieces of tensors are gathered together up to this size, in bytes; a larger row is gathered alone."""
ALIGNMENT = 16
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """Rows of a box that travel together."""

    name: str
    whole: Box
    box: Box
    """In the dtype in which it travels."""
    last: bool
    """Whether the tensor is complete with it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * self.box.dtype.itemsize


Slices = Mapping[tuple[str, Shape, Shape], LocalSlice]
"""This rank's slices with replica 0 by name, offsets and shape."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Gathers tensors on rank ``writer`` of ``world``, or on all ranks.

    Boxes are cut into pieces of at most a bucket, and every rank sends its pieces of a bucket to the writer as one
    message. So the writer needs memory for a bucket and one tensor, and any other rank for two buckets: its pieces,
    converted and as a message.
    """

    world: Comm
    writer: int
    convert: Callable[[LocalSlice], Tensor] = lambda part: part.tensor
    """Gives the values to send for a slice."""
    dtype_of: Callable[[str, torch.dtype], torch.dtype] = lambda name, dtype: dtype
    """The dtype after ``convert``, from a tensor's name and its dtype."""
    on_all_ranks: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def stream(
        self, placements: Placements, slices: Iterable[LocalSlice]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Names in the order of ``placements`` with full tensors, or None where this rank receives none.

        Collective: all ranks iterate to the end. A tensor is valid until the next item.
        """
        local = {(part.name, part.offsets, part.shape): part for part in slices if part.replica == 0}
        pieces = [piece for name in placements.shapes for piece in self._pieces(name, placements)]
        sizes = (0 if piece.box.rank == self.writer else _aligned(piece.nbytes) for piece in pieces)
        full: Tensor | None = None
        for bucket in buckets(pieces, sizes, self.bucket_bytes):
            received = self._exchange(bucket, local)
            for piece in bucket:
                shape = placements.shapes[piece.name]
                if self.world.rank == self.writer:
                    remote = received.get(piece.box.rank)
                    values = self._values(piece, local) if remote is None else next(remote)
                    full = self._filled(full, piece, values, shape)
                if piece.last:
                    if self.on_all_ranks and self.world.size > 1:
                        full = self._broadcast(full, shape, piece.box.dtype)
                    yield piece.name, full
                    full = None  # before the next one takes memory

    def _pieces(self, name: str, placements: Placements) -> Iterator[_Piece]:
        shape, boxes = placements.shapes[name], placements.boxes[name]
        if not boxes:  # of a tensor without elements
            boxes = (Box(self.writer, (0,) * len(shape), shape, torch.float32),)
        dtype = self.dtype_of(name, boxes[0].dtype)
        alone = [box.rank for box in boxes] == [self.writer]
        cuts = [
            (box, cut) for box in boxes for cut in ([box] if alone else _cut(box, dtype, self.bucket_bytes))
        ]
        for number, (box, cut) in enumerate(cuts, start=1):
            yield _Piece(name, box, replace(cut, dtype=dtype), last=number == len(cuts))

    def _exchange(self, bucket: Sequence[_Piece], local: Slices) -> dict[int, Iterator[Tensor]]:
        """Send this rank's pieces; on the writer, receive the pieces of each other rank, in order."""
        by_rank: dict[int, list[_Piece]] = {}
        for piece in bucket:
            by_rank.setdefault(piece.box.rank, []).append(piece)
        own = by_rank.pop(self.world.rank, [])
        if self.world.rank == self.writer:
            return {rank: iter(self._receive(rank, pieces)) for rank, pieces in by_rank.items()}
        if any(piece.nbytes for piece in own):
            message = _packed([self._values(piece, local) for piece in own])
            dist.send(message.to(self.world.device), group=self.world.group, group_dst=self.writer)
        return {}

    def _receive(self, rank: int, pieces: Sequence[_Piece]) -> list[Tensor]:
        ends = [*accumulate((_aligned(piece.nbytes) for piece in pieces), initial=0)]
        size = ends[-2] + pieces[-1].nbytes  # nothing pads the last one
        message = torch.empty(size, dtype=torch.uint8, device=self.world.device)
        if size:
            dist.recv(message, group=self.world.group, group_src=rank)
        return [
            message[start : start + piece.nbytes].view(piece.box.dtype).view(piece.box.shape)
            for start, piece in zip(ends, pieces, strict=False)
        ]

    def _values(self, piece: _Piece, local: Slices) -> Tensor:
        """The converted values of a piece of this rank."""
        box, whole = piece.box, piece.whole
        part = local.get((piece.name, whole.offsets, whole.shape))
        if part is None:  # of a tensor without elements
            return torch.empty(box.shape, dtype=box.dtype, device=self.world.device)
        starts = [start - first for start, first in zip(box.offsets, whole.offsets, strict=True)]
        rows = part.tensor[box_region(starts, box.shape)]
        return self.convert(replace(part, offsets=box.offsets, tensor=rows)).detach()

    def _filled(self, full: Tensor | None, piece: _Piece, values: Tensor, shape: Shape) -> Tensor:
        """``full``, or a new tensor of ``shape``, with the values of one more piece."""
        if full is None and piece.last and piece.box.rank == self.writer:
            return values
        if full is None:
            full = torch.empty(shape, dtype=piece.box.dtype, device=self.world.device)
        full[piece.box.region] = values
        return full

    def _broadcast(self, full: Tensor | None, shape: Shape, dtype: torch.dtype) -> Tensor:
        if full is None:
            full = torch.empty(shape, dtype=dtype, device=self.world.device)
        full = full.contiguous()
        dist.broadcast(full, group=self.world.group, group_src=self.writer)
        return full


def _cut(box: Box, dtype: torch.dtype, limit: int) -> Iterator[Box]:
    """Rows of ``box`` together up to ``limit`` bytes of ``dtype``; a larger row is alone."""
    row = math.prod(box.shape[1:]) * dtype.itemsize
    if not box.shape or not row:
        yield box
        return
    count, step = box.shape[0], max(1, limit // row)
    for start in range(0, max(1, count), step):
        first = (box.offsets[0] + start, *box.offsets[1:])
        yield replace(box, offsets=first, shape=(min(step, count - start), *box.shape[1:]))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of all ``parts``, with padding between them, so that each begins aligned."""
    data = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat([*(F.pad(part, (0, _aligned(len(part)) - len(part))) for part in data[:-1]), data[-1]])
