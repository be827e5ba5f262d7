"""Placement of the slices of all ranks, the check that they tile each tensor once, and copies of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core_rl.backend.tensors import ShardedState, box_region
from core_rl.distributed.comm import Comm
from core_rl.errors import EngineContractError, raise_all

Shape = tuple[int, ...]
Key = tuple[str, Shape, Shape]
"""Name, offsets and shape of a box."""


@dataclass(frozen=True)
class Box:
    """A slice of one tensor on one rank."""

    rank: int
    offsets: Shape
    shape: Shape
    dtype: torch.dtype

    @property
    def region(self) -> tuple[slice, ...]:
        return box_region(self.offsets, self.shape)


@dataclass(frozen=True)
class Placements:
    """For each tensor of one kind, its full shape and the boxes with replica 0, rank by rank."""

    shapes: Mapping[str, Shape]
    boxes: Mapping[str, tuple[Box, ...]]
    copies: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    """The other ranks that hold a box, for boxes that are on several."""


def gather_placements(state: ShardedState, kind: str, world: Comm) -> Placements:
    """The placements of ``kind`` over all ranks; collective.

    Raises one `EngineContractError` on all ranks that lists tensors whose slices overlap, leave gaps, or do not lie
    inside, and ranks whose names or shapes differ.
    """
    shapes = dict(state.shapes(kind))
    local_boxes: dict[str, list[Box]] = {}
    copies: list[Key] = []
    problems: list[str] = []
    for part in state.local(kind):
        if part.name in shapes:
            problems += _outside(part.name, part.shape, part.offsets, shapes[part.name])
        else:
            problems.append(f"{part.name!r} is not in shapes()")
        if part.replica == 0:
            local_boxes.setdefault(part.name, []).append(
                Box(world.rank, part.offsets, part.shape, part.tensor.dtype)
            )
        else:
            copies.append((part.name, part.offsets, part.shape))
    answers = world.gather((list(shapes.items()), local_boxes, copies, problems))
    problems = [problem for *_, reported in answers for problem in reported]
    if any(listed != answers[0][0] for listed, *_ in answers):
        problems.append("shapes() differs between ranks, in names, shapes or order")
    boxes = {name: tuple(box for _, theirs, *_ in answers for box in theirs.get(name, ())) for name in shapes}
    for name, listed_boxes in boxes.items():
        problems += _untiled(name, shapes[name], listed_boxes)
    raise_all(EngineContractError, f"ShardedState.local({kind!r}): slices with replica 0", problems)
    copy_ranks: dict[Key, list[int]] = {}
    for rank, (_, _, theirs, _) in enumerate(answers):
        for key in theirs:
            copy_ranks.setdefault(key, []).append(rank)
    return Placements(shapes, boxes, {key: tuple(ranks) for key, ranks in copy_ranks.items()})


def writers(placed: Placements, bytes_written: list[int]) -> dict[Key, int]:
    """The rank that writes each box, the same on all ranks: the holder with the least to write.

    ``bytes_written`` has the bytes of each rank so far, and is updated. Boxes that one rank alone holds are counted
    first, then the others, the largest first.
    """
    holders: dict[Key, tuple[int, tuple[int, ...]]] = {
        (name, box.offsets, box.shape): (math.prod(box.shape) * box.dtype.itemsize, (box.rank,))
        for name, listed_boxes in placed.boxes.items()
        for box in listed_boxes
    }
    for key, ranks in placed.copies.items():
        if key in holders:
            size, first = holders[key]
            holders[key] = (size, (*first, *ranks))
    writer_of: dict[Key, int] = {}
    order = sorted(holders.items(), key=lambda item: (len(item[1][1]) > 1, -item[1][0], item[0]))
    for key, (size, ranks) in order:
        writer_of[key] = min(ranks, key=lambda rank: (bytes_written[rank], rank))
        bytes_written[writer_of[key]] += size
    return writer_of


def _outside(name: str, shape: Shape, offsets: Shape, full_shape: Shape) -> Iterator[str]:
    """A box of ``shape`` at ``offsets`` that does not lie inside a tensor of the shape ``whole``."""
    inside = len(shape) == len(full_shape) == len(offsets) and all(
        offset >= 0 and offset + size <= limit
        for offset, size, limit in zip(offsets, shape, full_shape, strict=True)
    )
    if not inside:
        yield f"{name!r}: {list(shape)} at {list(offsets)} is not inside {list(full_shape)}"


def _untiled(name: str, full_shape: Shape, boxes: Sequence[Box]) -> Iterator[str]:
    """A tensor whose boxes overlap or leave gaps."""
    count, total = sum(math.prod(box.shape) for box in boxes), math.prod(full_shape)
    ordered = sorted((box for box in boxes if math.prod(box.shape)), key=lambda box: box.offsets)
    for number, box in enumerate(ordered):
        for peer in ordered[number + 1 :]:
            if full_shape and peer.offsets[0] >= box.offsets[0] + box.shape[0]:
                break
            bounds = zip(box.offsets, box.shape, peer.offsets, peer.shape, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in bounds):
                yield (
                    f"{name!r} {list(full_shape)}: rank {peer.rank} has {list(peer.shape)} at {list(peer.offsets)}, "
                    f"which overlaps {list(box.shape)} at {list(box.offsets)} of rank {box.rank}"
                )
                return
    if count < total:
        yield f"{name!r} {list(full_shape)}: {total - count} of {total} elements are on no rank"


@dataclass(frozen=True)
class Shard:
    """A rectangular piece of a tensor that the ranks hold together."""

    name: str
    tensor: Tensor
    """The piece itself; it may have no elements."""
    global_shape: tuple[int, ...]
    """The shape of the whole."""
    offsets: tuple[int, ...]
    """Start of the piece, one offset for each dimension."""


def copy_shards(rank: int, shards: Iterable[Shard]) -> list[Shard]:
    """True copies in host memory of all pieces of this rank.

    Raises `EngineContractError` for a piece that does not lie in its tensor.
    """
    copies: list[Shard] = []
    problems: list[str] = []
    for shard in shards:
        problems += _outside(shard.name, tuple(shard.tensor.shape), shard.offsets, shard.global_shape)
        if not problems:
            # Contiguous, in memory that no other shard shares: safetensors refuses views.
            copy = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device="cpu")
            copies.append(replace(shard, tensor=copy.copy_(shard.tensor.detach())))
    raise_all(EngineContractError, f"the shards of rank {rank}", problems)
    return copies
