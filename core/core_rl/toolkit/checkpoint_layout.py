"""Checkpoint layout of a model: transformers 5 has fused expert weights in memory and writes each expert.

Checkpoint names and shapes match ``save_pretrained``, and the files that a model came from where these have fused
experts transposed (`core_rl.toolkit.model_files`). They come from transformers' own conversion, which
is run on tensors without memory, so that no table of model families is kept here.
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

from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.dtensor import LocalPart

__all__ = ["CheckpointLayout", "CheckpointSlice"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CheckpointSlice:
    """A checkpoint tensor: one region of a parameter, with some of its dimensions in another order."""

    name: str
    region: tuple[slice, ...]
    """The region of the parameter, one slice for each dimension."""
    dims: tuple[int, ...]
    """The dimension of the parameter for each of the checkpoint tensor, which lacks others, of size 1 in the region."""

    @property
    def shape(self) -> Shape:
        """The shape in the checkpoint."""
        return tuple(self.region[d].stop - self.region[d].start for d in self.dims)

    def of(self, parameter: Tensor) -> Tensor:
        """A view of the whole parameter ``parameter``."""
        return self.arranged(parameter[self.region])

    def arranged(self, part: Tensor) -> Tensor:
        """A view of a ``part`` of the region with the dimensions of the checkpoint tensor."""
        lacking = [d for d in range(part.dim()) if d not in self.dims]
        return part.permute(*self.dims, *lacking).squeeze(tuple(range(len(self.dims), part.dim())))

    def common(self, region: Sequence[slice]) -> tuple[slice, ...] | None:
        """The overlap of ``region`` of the parameter with this slice; None if there is none."""
        pairs = zip(self.region, region, strict=True)
        overlap = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        return overlap if all(part.start < part.stop for part in overlap) else None


class CheckpointLayout:
    """Checkpoint slices of each parameter; most parameters are one slice under their own name."""

    def __init__(self, pieces: Mapping[str, tuple[CheckpointSlice, ...]]) -> None:
        self._pieces = dict(pieces)

    @staticmethod
    def of(model: PreTrainedModel, shapes: Mapping[str, Shape] | None = None) -> CheckpointLayout:
        """The checkpoint layout of ``model``, whose parameters may be sharded already. No collective.

        ``shapes`` are names and full shapes of its parameters, where these were renamed.

        Raises `UnsupportedCapability` where transformers' conversion does more than cut, transpose and rename.
        """
        if shapes is None:
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        # Without memory, in one storage: the start of a view identifies its tensor.
        sizes = [max(1, math.prod(shape)) for shape in shapes.values()]
        memory = torch.empty(sum(sizes), device="meta")
        starts = [*accumulate(sizes, initial=0)][:-1]
        tensors = {
            name: memory.as_strided(shape, torch.empty(shape, device="meta").stride(), start)
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        }
        with torch.no_grad(), _OnlyViews(type(model).__name__):
            written = revert_weight_conversion(model, dict(tensors))
        names = list(tensors)
        pieces: dict[str, list[CheckpointSlice]] = {name: [] for name in names}
        for name, tensor in written.items():
            owner = names[bisect_right(starts, tensor.storage_offset()) - 1]
            pieces[owner].append(_piece(name, tensor, tensors[owner]))
        incomplete = [name for name in names if not _complete(pieces[name], shapes[name])]
        if incomplete:
            raise UnsupportedCapability(
                f"{type(model).__name__} writes {incomplete[:3]} in a form that is no cut of its parameters"
            )
        return CheckpointLayout({name: tuple(slices) for name, slices in pieces.items()})

    def names(self, parameter: str) -> list[str]:
        """The checkpoint names of the parameter ``parameter``."""
        return [piece.name for piece in self._of(parameter, ())]

    def shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Checkpoint names and shapes of parameters with these names and shapes."""
        return {piece.name: piece.shape for name, shape in shapes.items() for piece in self._of(name, shape)}

    def cut(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and tensors of the whole in-memory ``tensor``.

        CheckpointSlices are copies: a view would keep, and pickle, the whole.
        """
        for piece in self._of(name, tuple(tensor.shape)):
            part = piece.of(tensor)
            is_complete = part.numel() == tensor.numel()
            yield (
                piece.name,
                part.contiguous() if is_complete else part.clone(memory_format=torch.contiguous_format),
            )

    def local(self, name: str, part: LocalPart, shape: Shape) -> Iterator[tuple[str, Shape, Tensor]]:
        """Checkpoint names, offsets and views of the boxes in ``part`` of the parameter ``name`` of shape ``shape``."""
        for piece in self._of(name, shape):
            common = piece.common(part.region)
            if common is None:
                continue
            inside = tuple(slice(c.start - o, c.stop - o) for c, o in zip(common, part.offsets, strict=True))
            offsets = tuple(common[d].start - piece.region[d].start for d in piece.dims)
            yield piece.name, offsets, piece.arranged(part.tensor[inside])

    def _of(self, name: str, shape: Shape) -> tuple[CheckpointSlice, ...]:
        """The slices of ``name``; a buffer is one slice under its own name."""
        region = tuple(slice(0, size) for size in shape)
        return self._pieces.get(name) or (CheckpointSlice(name, region, tuple(range(len(shape)))),)


class _OnlyViews(TorchDispatchMode):
    """Lets views pass, takes copies for their sources, and refuses every operation that computes."""

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
                "core-rl follows conversions that cut, transpose and rename"
            )
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _piece(name: str, written: Tensor, parameter: Tensor) -> CheckpointSlice:
    """``written``, a view of ``parameter``, as a region; dimensions are known by their strides."""
    offset = int(written.storage_offset() - parameter.storage_offset())
    left = {place: written.stride(place) for place in range(written.dim())}
    region, dims = [], [0] * written.dim()
    for d, (size, stride) in enumerate(zip(parameter.shape, parameter.stride(), strict=True)):
        start, offset = divmod(offset, stride) if stride else (0, offset)
        fitting = (p for p, step in left.items() if step == stride and start + written.shape[p] <= size)
        place = next(fitting, None)
        region.append(slice(start, start + (1 if place is None else written.shape[place])))
        if place is not None:
            dims[place] = d
            del left[place]
    if left or offset:
        raise UnsupportedCapability(
            f"{name!r} {list(written.shape)} is written in an order of elements that no cut of "
            f"{list(parameter.shape)} has"
        )
    return CheckpointSlice(name, tuple(region), tuple(dims))


def _complete(pieces: Sequence[CheckpointSlice], shape: Shape) -> bool:
    """Whether the pieces, which are views, hold each element once."""
    starts = {tuple(part.start for part in piece.region) for piece in pieces}
    return len(starts) == len(pieces) and sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
