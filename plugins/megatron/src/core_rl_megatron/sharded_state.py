"""`MegatronState`: Megatron's weights, gradients and moments as boxes of checkpoint tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.tensors import LocalSlice, TensorSource
from core_rl.config.engine import ModelConfig
from core_rl.distributed.comm import Comm
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.model_files import carried_tensors
from core_rl_megatron.naming import FlatRange, RowBox
from core_rl_megatron.optimizer import MOMENTS, ShardedOptimizer

__all__ = ["CheckpointTensors", "MegatronState"]

Shape = tuple[int, ...]
ABSENT = ("buffers", "adapter")
Key = tuple[str, Shape, Shape]
"""Name, offsets and shape of a box."""


@dataclass(frozen=True)
class CheckpointTensors:
    """Names and shapes that transformers writes for a model, and which of them are trained."""

    shapes: Mapping[str, Shape]
    trained: frozenset[str]
    carried: TensorSource | None
    """Those in the model's files that Megatron does not hold."""

    @staticmethod
    def of(model: PreTrainedModel, layout: CheckpointLayout, chosen: ModelConfig) -> CheckpointTensors:
        """Describe ``model``, which was built from ``chosen``, and whose parameters ``layout`` cuts."""
        named = dict(model.named_parameters())
        shapes = layout.shapes({name: tuple(parameter.shape) for name, parameter in named.items()})
        trained = (layout.names(name) for name, parameter in named.items() if parameter.requires_grad)
        return CheckpointTensors(
            shapes,
            frozenset(name for names in trained for name in names),
            carried_tensors(model, chosen, shapes),
        )


class MegatronState:
    """Boxes of this rank, by the ``boxes`` of its parameters. Making one is collective, and nothing else is.

    Parameters are whole on each data parallel rank; with the distributed optimizer, all other kinds are flat ranges.
    """

    def __init__(
        self,
        tensors: CheckpointTensors,
        boxes: Mapping[nn.Parameter, tuple[RowBox, ...]],
        optimizer: ShardedOptimizer | None,
        world: Comm,
    ) -> None:
        self._tensors = tensors
        self._boxes = boxes
        self._optimizer = optimizer
        self.carried = tensors.carried
        self.frozen = {
            parameter: parameter.detach().float()
            for parameter in boxes
            if parameter.dtype != torch.float32 and not (optimizer and parameter.requires_grad)
        }
        """Float32 weights of half-precision parameters that no optimizer has."""
        own = {kind: {_key(*part) for part in self._parts(kind)} for kind in ("params", "master")}
        before = world.gather(own)[: world.rank]
        self._replicas = {kind: Counter(key for keys in before for key in keys[kind]) for kind in own}

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        return MOMENTS if self._optimizer is not None and self._tensors.trained else ()

    def shapes(self, kind: str) -> dict[str, Shape]:
        if kind in ABSENT:
            return {}
        names = self._tensors.shapes if kind in ("params", "master") else self._tensors.trained
        return {name: shape for name, shape in self._tensors.shapes.items() if name in names}

    def local(self, kind: str) -> Iterator[LocalSlice]:
        # Gradients and moments lie where the float32 weights do.
        replicas = self._replicas["params" if kind == "params" else "master"]
        for name, offsets, tensor in self._parts(kind):
            yield LocalSlice(name, offsets, tensor, replicas[_key(name, offsets, tensor)])

    def _parts(self, kind: str) -> Iterator[tuple[str, Shape, Tensor]]:
        """Names, offsets and views of this rank's boxes."""
        for parameter, boxes in self._boxes.items() if kind not in ABSENT else ():
            flat = self._flat(parameter, kind)
            if flat is None:
                continue
            for box in boxes:
                for offsets, tensor in box.cut(tuple(parameter.shape), flat):
                    yield box.name, offsets, tensor

    def _flat(self, parameter: nn.Parameter, kind: str) -> FlatRange | None:
        """This rank's elements of ``kind``."""
        if kind == "params":
            return FlatRange(parameter.detach().view(-1), 0)
        if self._optimizer is not None and parameter.requires_grad:
            return self._optimizer.flat(parameter, kind)
        if kind == "master":
            return FlatRange(self.frozen.get(parameter, parameter).detach().view(-1), 0)
        return None


def _key(name: str, offsets: Shape, tensor: Tensor) -> Key:
    return name, offsets, tuple(tensor.shape)
