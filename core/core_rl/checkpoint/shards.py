"""The sharded format: each rank writes its slices, and any rank of any layout reads any region."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.checkpoint.tensor_files import SafetensorsFile, write_file
from core_rl.errors import CheckpointDamaged, CheckpointNotFound, WeightsError
from core_rl.state.slices import Shard

HEADER = "core_rl_shards"


def write_copies(directory: Path, rank: int, copies: Sequence[Shard], world_size: int) -> None:
    """Write what `copy_shards` took. No collective. Raises `CheckpointError` if the file cannot be written."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    for number, shard in enumerate(copies):
        key = f"{number:06d} {shard.name}"  # a rank may hold several pieces of one tensor
        tensors[key] = shard.tensor
        pieces[key] = {
            "name": shard.name,
            "global_shape": list(shard.global_shape),
            "offsets": list(shard.offsets),
        }
    header = json.dumps({"world_size": world_size, "pieces": pieces})
    write_file(directory / file_name(rank), tensors, {HEADER: header})


def file_name(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class _Piece:
    file: SafetensorsFile
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def overlap(self, target: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The part of ``target`` (start and stop in each dimension) that the piece covers."""
        bounds = zip(target, self.offsets, self.shape, strict=True)
        return [(max(start, at), min(stop, at + size)) for (start, stop), at, size in bounds]

    def read(self, region: Sequence[tuple[int, int]]) -> Tensor:
        return self.file.read(self.key, _slices(region, self.offsets))


class ShardFiles:
    """A `TensorSource` over the files of all ranks; the number of ranks that read may be another.

    Raises `CheckpointNotFound` if ``directory`` has no such files. Raises `CheckpointDamaged`
    for a file that is missing or cannot be read, for pieces that contradict each other, and for a
    region that no piece covers.
    """

    def __init__(self, directory: Path) -> None:
        first = directory / file_name(0)
        if not first.is_file() and not any(directory.glob("rank-*.safetensors")):
            raise CheckpointNotFound(f"{directory} holds no files of shards, such as {first.name}")
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], _Piece]] = {}
        self.world_size = self._index(SafetensorsFile(first))
        """Number of ranks that wrote."""
        for rank in range(1, self.world_size):
            self._index(SafetensorsFile(directory / file_name(rank)))

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise WeightsError(f"the shards hold no tensor {name!r}")
        return self._shapes[name]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor ``name`` on the CPU, or the part of it that ``slices`` names, one for each dimension."""
        bounds = bounds_of(slices or (), self.shape(name))
        pieces = list(self._pieces[name].values())
        for piece in pieces:
            if piece.overlap(bounds) == bounds:
                return piece.read(bounds)
        return self._assemble(name, bounds, pieces)

    def _assemble(self, name: str, bounds: list[tuple[int, int]], pieces: list[_Piece]) -> Tensor:
        shape = [stop - start for start, stop in bounds]
        starts = [start for start, _ in bounds]
        covered = torch.zeros(shape, dtype=torch.bool)
        result: Tensor | None = None
        for piece in pieces:
            region = piece.overlap(bounds)
            if any(start >= stop for start, stop in region):
                continue
            target = _slices(region, starts)
            if covered[target].all():
                continue
            part = piece.read(region)
            result = torch.empty(shape, dtype=part.dtype) if result is None else result
            result[target] = part
            covered[target] = True
        if result is None:
            result = torch.empty(shape, dtype=pieces[0].read([(at, at) for at in pieces[0].offsets]).dtype)
        if not covered.all():
            missing = int((~covered).sum())
            raise CheckpointDamaged(
                f"no rank wrote {missing} of the elements {bounds} of the tensor {name!r}"
            )
        return result

    def _index(self, file: SafetensorsFile) -> int:
        """Index the pieces of one file; returns the number of ranks in its header."""
        try:
            header = json.loads(file.metadata[HEADER])
        except (KeyError, ValueError) as error:
            raise CheckpointDamaged(f"{file.name} is not a file of shards: {error}") from error
        for key, entry in header["pieces"].items():
            name, full_shape, offsets = entry["name"], tuple(entry["global_shape"]), tuple(entry["offsets"])
            if self._shapes.setdefault(name, full_shape) != full_shape:
                raise CheckpointDamaged(
                    f"{file.name}: {name!r} is {full_shape}, and {self._shapes[name]} elsewhere"
                )
            piece = _Piece(file, key, file.shape(key), offsets)
            # Replicas: the first is enough.
            self._pieces.setdefault(name, {}).setdefault((piece.shape, offsets), piece)
        return int(header["world_size"])


def bounds_of(slices: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop of ``slices`` in each dimension of a tensor of ``shape``; `WeightsError` for a step."""
    padded = slices + (slice(None),) * (len(shape) - len(slices))
    bounds = []
    for part, size in zip(padded, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise WeightsError(f"{part} has step {step}; read a contiguous region")
        bounds.append((start, max(start, stop)))
    return bounds


def _slices(region: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(region, origin, strict=True))
