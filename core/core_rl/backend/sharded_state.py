"""Sharded tensors of a model: the one description of what a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["LocalSlice", "ShardedState"]


@dataclass(frozen=True)
class LocalSlice:
    """One box of one checkpoint tensor: this rank's part, or one of several."""

    name: str
    """As `save_pretrained` writes it."""
    offsets: tuple[int, ...]
    """The first element of the box, one number for each dimension."""
    tensor: Tensor
    """A writable view of live memory, in the shape of the box."""
    replica: int = 0
    """0 on exactly one of the ranks that hold this box, and above 0 on all others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(self.tensor.shape)

    @property
    def region(self) -> tuple[slice, ...]:
        """The box as slices of the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))


class ShardedState(Protocol):
    """Names, shapes and local slices of every kind of tensor; see `core_rl.backend.meta.TensorKind`.

    Names and shapes are those of the checkpoint that `save_pretrained` writes; a tied weight appears once. A backend
    that holds several checkpoint tensors in one parameter, or a flat range of one, splits it into boxes. Slices with
    ``replica`` 0 tile each tensor exactly once over all ranks. Different kinds of a tensor may be on different ranks.
    A kind that the model or the engine lacks, such as ``adapter``, is empty.
    """

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """The kinds of the optimizer's moments, such as ``("exp_avg", "exp_avg_sq")``; empty without an optimizer."""
        ...

    def shapes(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        """Names and full shapes of ``kind``, in the same order on all ranks. No collective."""
        ...

    def local(self, kind: str) -> Iterator[LocalSlice]:
        """This rank's slices of ``kind``, in any order. No collective."""
        ...
