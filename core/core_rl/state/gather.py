"""Full tensors out of the slices of all ranks, a bucket of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

    Every rank sends its slices of a bucket to the writer as one message, so the writer's memory is bounded by
    the bucket and no other rank needs any.
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
        own: dict[str, list[LocalSlice]] = {}
        for part in slices:
            if part.replica == 0:
                own.setdefault(part.name, []).append(part)
        sizes = (
            math.prod(shape) * self._dtype(placements, name).itemsize
            for name, shape in placements.shapes.items()
        )
        for names in buckets(placements.shapes, sizes, self.bucket_bytes):
            yield from self._gathered(names, placements, own)

    def _dtype(self, placements: Placements, name: str) -> torch.dtype:
        boxes = placements.boxes[name]
        return self.dtype_of(name, boxes[0].dtype if boxes else torch.float32)

    def _gathered(
        self, names: list[str], placements: Placements, own: dict[str, list[LocalSlice]]
    ) -> Iterator[tuple[str, Tensor | None]]:
        parts = {name: [self.convert(part).detach() for part in own.get(name, ())] for name in names}
        received = self._exchange(names, placements, parts)
        for name in names:
            full: Tensor | None = None
            if received is not None:
                full = self._assembled(name, placements, parts[name], received)
            if self.on_all_ranks and self.world.size > 1:
                full = self._broadcast(full, placements, name)
            parts.pop(name)
            yield name, full
            del full  # before the next one takes memory

    def _assembled(
        self, name: str, placements: Placements, own: list[Tensor], received: dict[int, Iterator[Tensor]]
    ) -> Tensor:
        boxes, whole = placements.boxes[name], placements.shapes[name]
        if len(boxes) == 1 and boxes[0].rank == self.world.rank:
            return own[0]
        mine = iter(own)
        full = torch.empty(whole, dtype=self._dtype(placements, name), device=self.world.device)
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
                message = torch.cat(packed).to(self.world.device)
                dist.send(message, group=self.world.group, group_dst=self.writer)
            return None
        wanted: dict[int, list[tuple[Box, torch.dtype]]] = {}
        for name in names:
            for box in placements.boxes[name]:
                if box.rank != self.world.rank:
                    wanted.setdefault(box.rank, []).append((box, self._dtype(placements, name)))
        return {rank: iter(self._receive(rank, boxes)) for rank, boxes in wanted.items()}

    def _receive(self, rank: int, boxes: list[tuple[Box, torch.dtype]]) -> list[Tensor]:
        sizes = [math.prod(box.shape) * dtype.itemsize for box, dtype in boxes]
        message = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=self.world.device)
        if len(message):
            dist.recv(message, group=self.world.group, group_src=rank)
        found, start = [], 0
        for (box, dtype), size in zip(boxes, sizes, strict=True):
            found.append(message[start : start + size].view(dtype).view(box.shape))
            start += _aligned(size)
        return found

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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(part: Tensor) -> Tensor:
    """The bytes of ``part``, padded so that the next part begins aligned."""
    data = part.contiguous().reshape(-1).view(torch.uint8)
    padding = _aligned(len(data)) - len(data)
    return torch.cat([data, data.new_zeros(padding)]) if padding else data
