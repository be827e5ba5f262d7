"""`HeldTensors`: named tensors out of what each rank holds of them, whatever module they belong to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from core_rl.backend.meta import TensorKind
from core_rl.backend.named_tensors import NamedTensors, TensorSource
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.state.gather import LocalPart, ShardGather
from core_rl.toolkit.checkpoint_layout import WrittenForm

__all__ = ["HeldTensors"]


class HeldTensors(TrainEngine):
    """The hooks that stream and load named tensors; a subclass says what this rank holds.

    All ranks go through the same names in the same order. A rank that holds nothing of a tensor, such as
    that of another pipeline stage, has an empty part of it.
    """

    _written: WrittenForm
    """How what is held is written."""
    _holders: Mapping[str, tuple[int, ...]]
    """For each name, the ranks that hold the same part as this one; not this one where it holds nothing."""
    _gather: ShardGather
    """Over the ranks of `_copy_world`, where these are several."""

    @abstractmethod
    def _held(self, kind: TensorKind) -> Iterator[tuple[str, LocalPart]]:
        """Names and this rank's parts of ``kind``; a tied parameter comes once."""

    @abstractmethod
    def _held_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes as they are held, which `_held` and `_full_tensors` go by."""

    @abstractmethod
    def _load_held(self, kind: TensorKind, source: TensorSource) -> None:
        """Read this rank's parts from ``source``, which has the names and shapes of `_held_shapes`."""

    def _copy_world(self) -> Comm:
        """The ranks that hold one copy of all tensors between them; by default this one alone."""
        return Comm()

    def _exported_name(self, kind: TensorKind, name: str) -> str:
        """The name under which ``kind`` is exported."""
        del kind
        return name

    # ----------------------------------------------------------------- hooks

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        shapes = self._written.shapes(self._held_shapes(kind))
        return {self._exported_name(kind, name): shape for name, shape in shapes.items()}

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for held, full in self._full_tensors(kind):
            for name, tensor in self._written.cut(held, full):
                yield self._exported_name(kind, name), tensor if self.is_output_rank else None

    def _full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Full tensors as they are held, in the dtype in which ``kind`` is exported, on every rank."""
        parts = ((name, self._in_export_dtype(kind, name, part.tensor)) for name, part in self._held(kind))
        return parts if kind == "buffers" else self._in_full(parts)

    def _in_full(self, parts: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors out of the parts of the ranks that hold one copy."""
        return parts if self._copy_world().size == 1 else self._gather.stream(parts)

    def _in_export_dtype(self, kind: TensorKind, name: str, tensor: Tensor) -> Tensor:
        if kind == "buffers":
            return tensor
        half = kind == "params" and self.config.dtype == "bfloat16" and not _is_float32_head(name)
        return tensor.to(torch.bfloat16 if half else torch.float32)

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        self._load_held(kind, self._written.held(source))


def _is_float32_head(name: str) -> bool:
    """The scalar heads stay in float32, whatever the compute dtype."""
    return name == "score.weight"
