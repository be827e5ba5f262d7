"""Full tensors out of the parts that ranks hold, several of them with each collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from core_rl.distributed.comm import Comm
from core_rl.errors import EngineContractError, raise_all

__all__ = ["BUCKET_BYTES", "LocalPart", "ShardGather"]

BUCKET_BYTES = 32 * 2**20
"""Full tensors are gathered together up to this size, in bytes; a larger tensor goes alone."""


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor that this rank holds, and where it begins in the full one."""

    tensor: Tensor
    offsets: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """The part as slices of the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))


class ShardGather:
    """Gathers tensors over the ranks of ``world``, which hold one copy of each between them.

    ``parts`` are this rank's, by name, of any kind: all kinds of a name lie in the same places. Their
    full shapes are ``shapes``. Making one is collective: the ranks tell each other what they hold.

    Raises `EngineContractError` where the parts of all ranks do not make up a tensor.
    """

    def __init__(
        self, world: Comm, parts: Mapping[str, LocalPart], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._world = world
        self._shapes = dict(shapes)
        self._regions = world.gather({name: part.region for name, part in parts.items()})
        problems = [problem for name in shapes if (problem := self._problem(name)) is not None]
        raise_all(EngineContractError, "the parts that the ranks hold", problems)

    def _problem(self, name: str) -> str | None:
        distinct = {
            tuple((s.start, s.stop) for s in regions[name]): regions[name] for regions in self._regions
        }
        held, whole = sum(map(_count, distinct.values())), math.prod(self._shapes[name])
        inside = all(
            part.stop <= size
            for region in distinct.values()
            for part, size in zip(region, self._shapes[name], strict=True)
        )
        if held == whole and inside:
            return None
        return f"{name!r} {list(self._shapes[name])}: {held} of {whole} elements, at {sorted(distinct)}"

    def stream(
        self,
        parts: Iterable[tuple[str, Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, in the order of ``parts``, on every rank; collective, in that same order.

        Args:
            parts: names and what this rank holds of them, on the device of ``world``.
            bucket_bytes: how much is gathered at once.
        """
        bucket: list[tuple[str, Tensor]] = []
        filled = 0
        room = _Room()
        for name, part in parts:
            size = math.prod(self._shapes[name]) * part.element_size()
            if bucket and (filled + size > bucket_bytes or part.dtype != bucket[0][1].dtype):
                yield from self._gathered(bucket, room)
                bucket, filled = [], 0
            bucket.append((name, part))
            filled += size
        if bucket:
            yield from self._gathered(bucket, room)

    def _gathered(self, bucket: list[tuple[str, Tensor]], room: _Room) -> Iterator[tuple[str, Tensor]]:
        names = [name for name, _ in bucket]
        sizes = [sum(_count(regions[name]) for name in names) for regions in self._regions]
        length = max(sizes)
        received = room.take(self._world.size * length, bucket[0][1]).view(self._world.size, length)
        own, used = received[self._world.rank], 0
        for _, part in bucket:
            own[used : used + part.numel()] = part.detach().reshape(-1)
            used += part.numel()
        dist.all_gather(list(received), own, group=self._world.group)
        filled = [0] * self._world.size
        # Its own part comes last: a rank must export what it holds, should copies differ.
        order = sorted(range(self._world.size), key=lambda rank: rank == self._world.rank)
        for name in names:
            full = own.new_empty(self._shapes[name])
            for rank in order:
                region = self._regions[rank][name]
                piece = received[rank, filled[rank] : filled[rank] + _count(region)]
                full[region] = piece.view([part.stop - part.start for part in region])
                filled[rank] += len(piece)
            yield name, full
            del full  # before the next one takes memory


class _Room:
    """Memory that one bucket after the other uses: freed and taken anew each time, it would lie about in pieces."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, count: int, like: Tensor) -> Tensor:
        """``count`` elements of the dtype and on the device of ``like``."""
        buffer = self._buffer
        if buffer is None or buffer.dtype != like.dtype or len(buffer) < count:
            self._buffer = None
            buffer = self._buffer = like.new_empty(count)
        return buffer[:count]


def _count(region: tuple[slice, ...]) -> int:
    return math.prod(part.stop - part.start for part in region)
