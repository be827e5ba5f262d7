"""Snapshots: copies of local slices in host memory, to be written while training continues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_rl.errors import EngineContractError, raise_all

__all__ = ["Shard", "copy_shards"]


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

    def problem(self) -> str | None:
        """Why the piece does not lie in the whole, if so."""
        shape = tuple(self.tensor.shape)
        fits = len(shape) == len(self.global_shape) == len(self.offsets) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, shape, self.global_shape, strict=True)
        )
        if fits:
            return None
        return f"{self.name!r}: a piece of {list(shape)} at {list(self.offsets)} is not in {list(self.global_shape)}"


def copy_shards(rank: int, shards: Iterable[Shard]) -> list[Shard]:
    """True copies in host memory of all pieces of this rank.

    Raises `EngineContractError` for a piece that does not lie in its tensor.
    """
    copies, problems = [], []
    for shard in shards:
        if (problem := shard.problem()) is not None:
            problems.append(problem)
        elif not problems:
            copies.append(replace(shard, tensor=_unshared(shard.tensor)))
    raise_all(EngineContractError, f"the shards of rank {rank}", problems)
    return copies


def _unshared(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous, in memory that no other shard shares: safetensors refuses views."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
