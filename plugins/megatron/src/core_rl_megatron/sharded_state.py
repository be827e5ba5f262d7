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
from core_rl.toolkit.lora import checkpoint_name, exported_name, has_kind
from core_rl.toolkit.model_files import carried_tensors
from core_rl_megatron.naming import FlatRange, RowBox
from core_rl_megatron.optimizer import MOMENTS, ShardedOptimizer

Shape = tuple[int, ...]
Key = tuple[str, Shape, Shape]
"""Name, offsets and shape of a box."""


@dataclass(frozen=True)
class CheckpointTensors:
    """Names and shapes that transformers and ``peft`` write for a model, and which of them are trained."""

    shapes: Mapping[str, Shape]
    trained: frozenset[str]
    layout: CheckpointLayout
    """Layout of the parameters under their `checkpoint_name`."""
    carried: TensorSource | None
    """Tensors of the model's files that Megatron does not have."""

    @staticmethod
    def of(model: PreTrainedModel, config: ModelConfig) -> CheckpointTensors:
        """Describe ``model``, which was built from ``config``.

        Raises `UnsupportedCapability` as `CheckpointLayout.of` and `carried_tensors` do.
        """
        parameters = {checkpoint_name(name): parameter for name, parameter in model.named_parameters()}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        base = {name: shape for name, shape in shapes.items() if has_kind(name, "params", trained=False)}
        layout = CheckpointLayout.of(model, base)
        trained = (layout.names(name) for name, parameter in parameters.items() if parameter.requires_grad)
        return CheckpointTensors(
            layout.shapes(shapes),
            frozenset(name for names in trained for name in names),
            layout,
            carried_tensors(model, config, layout.shapes(base)),
        )

    def of_kind(self, kind: str) -> dict[str, Shape]:
        """Names, as in ``master``, and shapes of ``kind``; there are no buffers."""
        if kind == "buffers":
            return {}
        shapes = self.shapes.items()
        return {name: shape for name, shape in shapes if has_kind(name, kind, trained=name in self.trained)}


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
        *,
        copies: bool = True,
    ) -> None:
        """With ``copies``, weights in half precision that no optimizer has are kept in float32 as well."""
        self._tensors = tensors
        self.layout = tensors.layout
        self._boxes = boxes
        self._optimizer = optimizer
        self.carried = tensors.carried
        self.frozen = {
            parameter: parameter.detach().float()
            for parameter in boxes
            if copies and parameter.dtype != torch.float32 and not (optimizer and parameter.requires_grad)
        }
        """Float32 weights of half-precision parameters that no optimizer has."""
        own = {kind: {_key(*part) for part in self._parts(kind)} for kind in ("params", "master")}
        before = world.gather(own)[: world.rank]
        self._replicas = {kind: Counter(key for keys in before for key in keys[kind]) for kind in own}

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        return MOMENTS if self._optimizer is not None and self._tensors.trained else ()

    def shapes(self, kind: str) -> dict[str, Shape]:
        return {exported_name(kind, name): shape for name, shape in self._tensors.of_kind(kind).items()}

    def local(self, kind: str) -> Iterator[LocalSlice]:
        # Gradients and moments lie where the float32 weights do.
        replicas = self._replicas["params" if kind == "params" else "master"]
        for name, offsets, tensor in self._parts(kind):
            key = _key(name, offsets, tensor)
            yield LocalSlice(exported_name(kind, name), offsets, tensor, replicas[key])

    def _parts(self, kind: str) -> Iterator[tuple[str, Shape, Tensor]]:
        names = self._tensors.of_kind(kind)
        for parameter, boxes in self._boxes.items():
            requested = [box for box in boxes if box.name in names]
            flat = self._flat(parameter, "master" if kind == "adapter" else kind) if requested else None
            if flat is None:
                continue
            for box in requested:
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
