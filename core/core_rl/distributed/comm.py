"""Collectives of small objects over a process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["Comm", "RankGroups"]

T = TypeVar("T")


@dataclass(frozen=True)
class Comm:
    """A process group for scalars and small objects; ``group=None`` is a single rank."""

    group: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shared: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """Objects that all engines on these ranks share, such as process groups of some of the ranks."""
    timeout_s: float = field(default=600.0, compare=False)
    """Seconds that ranks wait for each other."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    def gather(self, value: T) -> list[T]:
        """The picklable ``value`` of every rank, in rank order, on every rank."""
        if self.group is None or self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The picklable ``value`` of rank ``source``, on every rank."""
        if self.group is None or self.size == 1:
            return value
        box: list[Any] = [value if self.rank == source else None]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        result: T = box[0]
        return result

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.sum([0.0])

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None or self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op, group=self.group)
        result: list[float] = tensor.tolist()
        return result


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The data- and model-parallel groups of a rank."""

    data_parallel: Comm
    """Ranks with the same part of the model, each with other sequences."""
    model_parallel: Comm = field(default_factory=Comm)
    """Ranks that together hold one copy of the model and see the same sequences."""
    output_source: int = 0
    """The rank inside ``model_parallel`` on which outputs appear (the last pipeline stage)."""

    @property
    def is_output_rank(self) -> bool:
        """True if outputs and exported tensors appear on this rank."""
        return self.model_parallel.rank == self.output_source

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes what exists once: the output rank of data-parallel rank 0."""
        return self.is_output_rank and self.data_parallel.rank == 0
