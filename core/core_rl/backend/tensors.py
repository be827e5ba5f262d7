"""Tensors of a model under their Hugging Face names: a rank's slices of them, and streams and sources of full ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core_rl.errors import WeightsError, raise_all

__all__ = [
    "LocalSlice",
    "MappedSource",
    "NamedTensors",
    "ReplicatedState",
    "ShardedState",
    "TensorDict",
    "TensorSource",
    "box_region",
    "check_shapes",
    "check_source",
]


def box_region(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The box of ``shape`` at ``offsets`` as slices of the full tensor, one for each dimension."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))


@dataclass(frozen=True)
class LocalSlice:
    """A box of a checkpoint tensor: all or a part of this rank's share."""

    name: str
    """As `save_pretrained` writes it."""
    offsets: tuple[int, ...]
    """The first element of the box, one number for each dimension."""
    tensor: Tensor
    """A writable view of live memory, in the shape of the box; see `ShardedState.local` for copies."""
    replica: int = 0
    """0 on exactly one rank with this box, and above 0 on all others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(self.tensor.shape)

    @property
    def region(self) -> tuple[slice, ...]:
        """The box as slices of the full tensor."""
        return box_region(self.offsets, self.tensor.shape)


class ShardedState(Protocol):
    """Names, shapes and local slices of every kind of tensor; see `core_rl.backend.meta.TensorKind`.

    Names and shapes are as `save_pretrained` writes them; a tied weight appears once. A backend
    that holds several checkpoint tensors in one parameter, or a flat range of one, splits it into boxes. Slices with
    ``replica`` 0 tile each tensor exactly once over all ranks. Different kinds of a tensor may be on different ranks.
    A kind that the model or the engine lacks, such as ``adapter``, is empty.
    """

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """The kinds of the optimizer's moments, such as ``("exp_avg", "exp_avg_sq")``; empty without an optimizer."""

    @property
    def carried(self) -> TensorSource | None:
        """Tensors of the checkpoint in ``model.path`` that the module does not hold; the same names on all ranks.

        Such as a vision tower, or an extra head. The core writes them into every export as they are. A backend that
        cannot give them refuses the checkpoint. None where there are none.
        """

    def shapes(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        """Names and full shapes of ``kind``, in the same order on all ranks. No collective."""

    def local(self, kind: str) -> Iterator[LocalSlice]:
        """This rank's slices of ``kind``, in any order. No collective.

        Tensors stored in another form, such as moments of 8 bits, come as float32 copies, and go back into their form
        when the iterator advances: a caller writes slice by slice.
        """


@dataclass(frozen=True, kw_only=True)
class ReplicatedState:
    """A `ShardedState` of data-parallel ranks that have every tensor in full, whatever framework it is in."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Writable views of live memory: by kind, and by checkpoint name in the same order on all ranks."""
    rank: int
    """The data-parallel rank, which is the number of the replica."""
    optimizer_kinds: tuple[str, ...] = ()
    carried: TensorSource | None = None

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.get(kind, {}).items()}

    def local(self, kind: str) -> Iterator[LocalSlice]:
        for name, tensor in self.tensors.get(kind, {}).items():
            yield LocalSlice(name, (0,) * tensor.dim(), tensor, self.rank)


NamedTensors = Iterator[tuple[str, Tensor | None]]
"""A collective stream: every rank iterates to the end, and only the writer receives a tensor, which is valid
until the next item."""


class TensorSource(Protocol):
    """Random access to named tensors, so that a rank reads only its slices."""

    def names(self) -> list[str]:
        """All names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of ``name``."""

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor ``name`` on the CPU, or the part of it that ``slices`` names, one for each dimension."""


class TensorDict:
    """A `TensorSource` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if slices is None else tensor[slices]


class MappedSource:
    """A `TensorSource` that gives other names to tensors of another source, or selects some of them."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)
        """The name in ``source`` for each name here."""

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self._source.read(self._names[name], slices)


def check_source(source: TensorSource, expected: Mapping[str, tuple[int, ...]], subject: str) -> None:
    """Raise one `WeightsError` that lists every missing, unexpected and misshapen tensor of ``source``."""
    check_shapes({name: source.shape(name) for name in source.names()}, expected, subject)


def check_shapes(
    actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], subject: str
) -> None:
    """Raise one `WeightsError` that lists every missing, unexpected and misshapen tensor of ``actual``."""
    problems = [f"missing {name!r} {list(shape)}" for name, shape in expected.items() if name not in actual]
    problems += [f"unexpected {name!r} {list(actual[name])}" for name in sorted(set(actual) - set(expected))]
    problems += [
        f"{name!r} is {list(actual[name])}; the model has {list(shape)}"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    raise_all(WeightsError, subject, problems)
