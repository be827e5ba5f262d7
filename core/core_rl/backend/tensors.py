"""Named tensors: any parameter-shaped quantity under its Hugging Face name and in its full shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from core_rl.errors import WeightsError, raise_all

__all__ = ["MappedSource", "NamedTensors", "TensorDict", "TensorSource", "check_shapes", "check_source"]

NamedTensors = Iterator[tuple[str, Tensor | None]]
"""A collective stream: every rank iterates to the end, and only the writer receives a tensor, which is valid
until the next item."""


class TensorSource(Protocol):
    """Random access to named tensors, so that a rank reads only what it owns."""

    def names(self) -> list[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of ``name``."""
        ...

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor ``name`` on the CPU, or the part of it that ``slices`` names, one for each dimension."""
        ...


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
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], subject: str
) -> None:
    """Raise one `WeightsError` that lists every missing, unexpected and misshapen tensor of ``found``."""
    problems = [f"missing {name!r} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name!r} {list(found[name])}" for name in sorted(set(found) - set(expected))]
    problems += [
        f"{name!r} is {list(found[name])}; the model has {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    raise_all(WeightsError, subject, problems)
