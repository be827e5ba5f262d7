"""How a model's parameters are written: transformers 5 holds fused expert weights and writes each expert.

The written form is the contract's: names and shapes of ``save_pretrained``. It is taken from
transformers' own conversion, which is run on tensors without memory, so that no table of model
families is kept here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from core_rl.backend.named_tensors import TensorSource
from core_rl.errors import UnsupportedCapability

__all__ = ["Piece", "WrittenForm"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A written tensor: one region of a held one, without the dimensions that ``dropped`` names."""

    name: str
    region: tuple[slice, ...]
    """Where it lies in the held tensor, one slice for each dimension."""
    dropped: tuple[int, ...]
    """Dimensions of the held tensor, of size 1 in the region, that the written one lacks."""

    @property
    def shape(self) -> Shape:
        """Its written shape."""
        return tuple(s.stop - s.start for d, s in enumerate(self.region) if d not in self.dropped)

    def of(self, held: Tensor) -> Tensor:
        """The piece of the whole ``held`` tensor, a view."""
        return held[self.region].squeeze(self.dropped)

    def common(self, region: Sequence[slice]) -> tuple[slice, ...] | None:
        """What ``region`` of the held tensor has in common with the piece; None if nothing."""
        pairs = zip(self.region, region, strict=True)
        found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        return found if all(part.start < part.stop for part in found) else None


class WrittenForm:
    """The written pieces of each held parameter; most parameters are written as they are held."""

    def __init__(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self._pieces = dict(pieces)

    @staticmethod
    def of(model: PreTrainedModel, shapes: Mapping[str, Shape] | None = None) -> WrittenForm:
        """The written form of ``model``, whose parameters may be sharded already. No collective.

        ``shapes`` are names and full shapes of its parameters, where they bear other names by now.

        Raises `UnsupportedCapability` where transformers' conversion does more than cut and rename.
        """
        if shapes is None:
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        held = _imaginary(shapes)
        with torch.no_grad(), _OnlyViews(type(model).__name__):
            written = revert_weight_conversion(model, dict(held))
        names, starts = list(held), [tensor.storage_offset() for tensor in held.values()]
        pieces: dict[str, list[Piece]] = {name: [] for name in names}
        for name, tensor in written.items():
            owner = names[bisect_right(starts, tensor.storage_offset()) - 1]
            pieces[owner].append(_piece(name, tensor, held[owner]))
        incomplete = [name for name in names if not _complete(pieces[name], shapes[name])]
        if incomplete:
            raise UnsupportedCapability(
                f"{type(model).__name__} writes {incomplete[:3]} in a form that is no cut of what it holds"
            )
        return WrittenForm({name: tuple(found) for name, found in pieces.items()})

    def names(self, held: str) -> list[str]:
        """The written names of the parameter ``held``."""
        return [piece.name for piece in self._of(held, ())]

    def shapes(self, held: Mapping[str, Shape]) -> dict[str, Shape]:
        """Written names and shapes of tensors that are held so."""
        return {piece.name: piece.shape for name, shape in held.items() for piece in self._of(name, shape)}

    def cut(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Written names and tensors of the whole held ``tensor``.

        Pieces are copies: a view would keep, and pickle, the whole.
        """
        for piece in self._of(name, tuple(tensor.shape)):
            part = piece.of(tensor)
            yield piece.name, part if part.numel() == tensor.numel() else part.clone()

    def held(self, source: TensorSource) -> TensorSource:
        """A view of ``source``, which has written names, in held ones; it reads what a region needs."""
        return _HeldSource(source, self._pieces)

    def _of(self, name: str, shape: Shape) -> tuple[Piece, ...]:
        """The pieces of ``name``; what is no parameter (a buffer) is written as it is held."""
        return self._pieces.get(name) or (Piece(name, tuple(slice(0, size) for size in shape), ()),)


class _HeldSource:
    """A `TensorSource` in held names over one in written names."""

    def __init__(self, source: TensorSource, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self._source = source
        self._pieces = pieces

    def names(self) -> list[str]:
        return list(self._pieces)

    def shape(self, name: str) -> Shape:
        ends = [[part.stop for part in piece.region] for piece in self._pieces[name]]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        pieces = self._pieces.get(name)
        if pieces is None or (len(pieces) == 1 and not pieces[0].dropped):
            return self._source.read(name if pieces is None else pieces[0].name, slices)
        region = slices or tuple(slice(0, size) for size in self.shape(name))
        parts = [(piece, common) for piece in pieces if (common := piece.common(region)) is not None]
        shape = [part.stop - part.start for part in region]
        result: Tensor | None = None
        for piece, common in parts:
            part = self._source.read(piece.name, _inside(piece, common))
            result = part.new_empty(shape) if result is None else result
            where = tuple(
                slice(c.start - r.start, c.stop - r.start) for c, r in zip(common, region, strict=True)
            )
            result[where] = part.reshape([c.stop - c.start for c in common])
        return torch.empty(shape) if result is None else result


def _inside(piece: Piece, common: Sequence[slice]) -> tuple[slice, ...]:
    """``common``, a region of the held tensor, as slices of the written ``piece``."""
    return tuple(
        slice(part.start - own.start, part.stop - own.start)
        for d, (part, own) in enumerate(zip(common, piece.region, strict=True))
        if d not in piece.dropped
    )


def _imaginary(shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Tensors without memory, one behind another in one storage: where a view begins tells whose it is."""
    sizes = [max(1, math.prod(shape)) for shape in shapes.values()]
    memory = torch.empty(sum(sizes), device="meta")
    starts = accumulate(sizes, initial=0)
    return {
        name: memory.as_strided(shape, torch.empty(shape, device="meta").stride(), start)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }


class _OnlyViews(TorchDispatchMode):
    """Lets views pass, takes copies for what they copy, and refuses every operation that computes."""

    def __init__(self, model: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if not func.is_view:
            raise UnsupportedCapability(
                f"{self._model} writes parameters in another form than it holds them, by {func}; "
                "core-rl follows conversions that cut and rename"
            )
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _piece(name: str, written: Tensor, held: Tensor) -> Piece:
    """``written``, a view of ``held``, as a region; dimensions are known by their strides."""
    offset = int(written.storage_offset() - held.storage_offset())
    left = list(zip(written.shape, written.stride(), strict=True))
    region, dropped = [], []
    for d, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
        start, offset = divmod(offset, stride) if stride else (0, offset)
        if left and left[0][1] == stride and start + left[0][0] <= size:
            region.append(slice(start, start + left.pop(0)[0]))
        else:
            region.append(slice(start, start + 1))
            dropped.append(d)
    if left or offset:
        raise UnsupportedCapability(
            f"{name!r} {list(written.shape)} is written in an order of elements that no cut of "
            f"{list(held.shape)} has"
        )
    return Piece(name, tuple(region), tuple(dropped))


def _complete(pieces: Sequence[Piece], shape: Shape) -> bool:
    """Whether the pieces, which are views, hold each element once."""
    starts = {tuple(part.start for part in piece.region) for piece in pieces}
    return len(starts) == len(pieces) and sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
