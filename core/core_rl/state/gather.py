"""Full tensors out of the slices of all ranks, a bucket of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.backend.tensors import LocalSlice
from core_rl.distributed.comm import Comm
from core_rl.state.slices import Box, Placements

__all__ = ["BUCKET_BYTES", "Gather", "buckets"]

T = TypeVar("T")

BUCKET_BYTES = 32 * 2**20
"""Full tensors are gathered together up to this size, in bytes; a larger tensor is gathered alone."""
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Gathers tensors on rank ``writer`` of ``world``, or on all ranks.

    Every rank sends its slices of a bucket to the writer as one message, and slices of a larger tensor in pieces of
    that size. So the writer needs memory for a bucket or the larger tensor, and any other rank for two buckets: its
    slices, converted and as a message.
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
        local_slices: dict[str, list[LocalSlice]] = {}
        for part in slices:
            if part.replica == 0:
                local_slices.setdefault(part.name, []).append(part)
        sizes = (self._bytes_of(name, placements) for name in placements.shapes)
        for names in buckets(placements.shapes, sizes, self.bucket_bytes):
            if placements.shapes[names[0]] and self._bytes_of(names[0], placements) > self.bucket_bytes:
                yield names[0], self._large(names[0], placements, local_slices.get(names[0], []))
            else:
                yield from self._gathered(names, placements, local_slices)

    def _bytes_of(self, name: str, placements: Placements) -> int:
        return math.prod(placements.shapes[name]) * self._dtype(placements, name).itemsize

    def _dtype(self, placements: Placements, name: str) -> torch.dtype:
        boxes = placements.boxes[name]
        return self.dtype_of(name, boxes[0].dtype if boxes else torch.float32)

    def _gathered(
        self, names: list[str], placements: Placements, local_slices: dict[str, list[LocalSlice]]
    ) -> Iterator[tuple[str, Tensor | None]]:
        parts = {name: [self.convert(part).detach() for part in local_slices.get(name, ())] for name in names}
        received = self._exchange(names, placements, parts)
        for name in names:
            full: Tensor | None = None
            if received is not None:
                full = self._assembled(name, placements, parts[name], received)
            parts.pop(name)
            yield name, self._shared(full, placements, name)
            del full  # before the next one takes memory

    def _large(self, name: str, placements: Placements, local_slices: list[LocalSlice]) -> Tensor | None:
        """A tensor above the size of a bucket, box by box and in pieces; None where this rank receives none."""
        boxes, dtype = placements.boxes[name], self._dtype(placements, name)
        writes, mine = self.world.rank == self.writer, iter(local_slices)
        if writes and [box.rank for box in boxes] == [self.writer]:
            return self._shared(self.convert(local_slices[0]).detach(), placements, name)
        full: Tensor | None = None
        if writes:
            full = torch.empty(placements.shapes[name], dtype=dtype, device=self.world.device)
        for box in boxes:
            part = next(mine) if box.rank == self.world.rank else None
            for rows in _pieces(box.shape, dtype.itemsize, self.bucket_bytes):
                if full is not None:
                    target = full[box.region][rows]
                    target.copy_(
                        self._received(target, box.rank) if part is None else self._piece(part, rows)
                    )
                elif part is not None:
                    self._send(self._piece(part, rows).contiguous())
        return self._shared(full, placements, name)

    def _piece(self, part: LocalSlice, rows: slice) -> Tensor:
        """Some rows of a slice, converted."""
        offsets = (part.offsets[0] + rows.start, *part.offsets[1:])
        return self.convert(replace(part, offsets=offsets, tensor=part.tensor[rows])).detach()

    def _send(self, values: Tensor) -> None:
        message = values.view(-1).view(torch.uint8).to(self.world.device)
        dist.send(message, group=self.world.group, group_dst=self.writer)

    def _received(self, target: Tensor, rank: int) -> Tensor:
        """The next piece of ``rank``, in ``target`` itself where that is contiguous."""
        piece = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        dist.recv(piece.view(-1).view(torch.uint8), group=self.world.group, group_src=rank)
        return piece

    def _shared(self, full: Tensor | None, placements: Placements, name: str) -> Tensor | None:
        """``full`` on all ranks, where all are to have it."""
        if self.on_all_ranks and self.world.size > 1:
            return self._broadcast(full, placements, name)
        return full

    def _assembled(
        self,
        name: str,
        placements: Placements,
        local_values: list[Tensor],
        received: dict[int, Iterator[Tensor]],
    ) -> Tensor:
        boxes, full_shape = placements.boxes[name], placements.shapes[name]
        if len(boxes) == 1 and boxes[0].rank == self.world.rank:
            return local_values[0]
        mine = iter(local_values)
        full = torch.empty(full_shape, dtype=self._dtype(placements, name), device=self.world.device)
        for box in boxes:
            full[box.region] = next(mine if box.rank == self.world.rank else received[box.rank])
        return full

    def _exchange(
        self, names: list[str], placements: Placements, parts: dict[str, list[Tensor]]
    ) -> dict[int, Iterator[Tensor]] | None:
        """On the writer, the slices of each other rank in order; None on all other ranks."""
        if self.world.rank != self.writer:
            packed = [_bytes(part) for name in names for part in parts[name]]
            if sum(map(len, packed)):
                self._send(torch.cat(packed))
            return None
        expected: dict[int, list[tuple[Box, torch.dtype]]] = {}
        for name in names:
            for box in placements.boxes[name]:
                if box.rank != self.world.rank:
                    expected.setdefault(box.rank, []).append((box, self._dtype(placements, name)))
        return {rank: iter(self._receive(rank, boxes)) for rank, boxes in expected.items()}

    def _receive(self, rank: int, boxes: list[tuple[Box, torch.dtype]]) -> list[Tensor]:
        sizes = [math.prod(box.shape) * dtype.itemsize for box, dtype in boxes]
        message = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=self.world.device)
        if len(message):
            dist.recv(message, group=self.world.group, group_src=rank)
        tensors, start = [], 0
        for (box, dtype), size in zip(boxes, sizes, strict=True):
            tensors.append(message[start : start + size].view(dtype).view(box.shape))
            start += _aligned(size)
        return tensors

    def _broadcast(self, full: Tensor | None, placements: Placements, name: str) -> Tensor:
        if full is None:
            dtype = self._dtype(placements, name)
            full = torch.empty(placements.shapes[name], dtype=dtype, device=self.world.device)
        full = full.contiguous()
        dist.broadcast(full, group=self.world.group, group_src=self.writer)
        return full


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


def _pieces(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[slice]:
    """Rows of a box of ``shape`` together up to ``limit`` bytes; a larger row is alone. None of an empty box."""
    row = math.prod(shape[1:]) * itemsize
    step = max(1, limit // row) if row else 1
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0] if row else 0, step))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(part: Tensor) -> Tensor:
    """The bytes of ``part``, padded so that the next part begins aligned."""
    data = part.contiguous().reshape(-1).view(torch.uint8)
    padding = _aligned(len(data)) - len(data)
    return torch.cat([data, data.new_zeros(padding)]) if padding else data
