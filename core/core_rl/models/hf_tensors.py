"""`HFTensors`: the tensors of a Hugging Face module and its optimizer by name, however they are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.engines.collectives import World
from core_rl.engines.meta import TensorKind
from core_rl.engines.named_tensors import NamedTensors, TensorSource
from core_rl.engines.train import TrainEngine
from core_rl.models.gather import LocalPart, ShardGather
from core_rl.models.lora import (
    ADAPTER_PREFIX,
    LowRank,
    merged,
    written_name,
)
from core_rl.models.optimizer import moment, set_moment
from core_rl.models.written_form import WrittenForm

__all__ = ["HFTensors"]


class HFTensors(TrainEngine):
    """The hooks that stream and load named tensors, over ``self.model`` and ``self.optimizer``."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW | None
    _written: WrittenForm
    _products: Mapping[str, LowRank]
    _owned: dict[str, nn.Parameter]
    _holders: dict[str, tuple[int, ...]]
    _gather: ShardGather

    # ------------------------------------------------- how a tensor is spread

    def _local(self, tensor: Tensor) -> LocalPart:
        """What this rank holds of a parameter-shaped ``tensor``; by default all of it."""
        return LocalPart(tensor, (0,) * tensor.dim())

    def _copy_world(self) -> World:
        """The ranks that hold one copy of all tensors between them; by default this one alone."""
        return World()

    # ----------------------------------------------------------------- hooks

    def _hf_config(self) -> PretrainedConfig:
        return self.model.config

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that are written; a tied one comes once."""
        for name, parameter in self.model.named_parameters():
            yield self._written_name(name), parameter

    def _written_name(self, name: str) -> str:
        return written_name(name) if self.config.model.lora is not None else name

    def _named_parameters_of(self, kind: TensorKind) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that ``kind`` is about."""
        for name, parameter in self._named_parameters():
            of_adapter = name.startswith(ADAPTER_PREFIX)
            chosen = {
                "params": not of_adapter,
                "master": True,
                "adapter": of_adapter or name.startswith("score."),
            }
            if chosen.get(kind, parameter.requires_grad):
                yield name, parameter

    def _held(self, kind: TensorKind) -> Iterator[tuple[str, LocalPart]]:
        """Names and this rank's parts of ``kind``; a tied parameter comes once."""
        if kind == "buffers":
            written = self.model.state_dict().keys()
            for name, buffer in self.model.named_buffers():
                if name in written:
                    yield name, LocalPart(buffer, (0,) * buffer.dim())
            return
        for name, parameter in self._named_parameters_of(kind):
            part = self._local(parameter.detach())
            if kind in ("params", "master", "adapter"):
                yield name, part
            else:
                yield name, LocalPart(self._quantity(name, parameter, kind), part.offsets)

    def _quantity(self, name: str, parameter: nn.Parameter, kind: TensorKind) -> Tensor:
        """This rank's part of the gradient or a moment of ``parameter``."""
        owned = self._owned[name]
        if kind == "exp_avg" or kind == "exp_avg_sq":
            if self.optimizer is None:
                return torch.zeros_like(owned, requires_grad=False)
            return moment(self.optimizer, owned, kind)
        if parameter.grad is None:
            return torch.zeros_like(owned, requires_grad=False)
        return self._local(parameter.grad).tensor

    def _base_shapes(self) -> dict[str, tuple[int, ...]]:
        """All parameters of the model itself: adapters are written as they are held."""
        return {name: tuple(parameter.shape) for name, parameter in self._named_parameters_of("params")}

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        shapes = self._written.shapes(self._held_shapes(kind))
        return {_exported_name(kind, name): shape for name, shape in shapes.items()}

    def _held_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes as the module holds them, which `_held` and `_full_tensors` go by."""
        if kind == "buffers":
            return {name: tuple(part.tensor.shape) for name, part in self._held("buffers")}
        return {name: tuple(parameter.shape) for name, parameter in self._named_parameters_of(kind)}

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        merging = kind == "params" and bool(self._products)
        for held, full in self._merged() if merging else self._full_tensors(kind):
            for name, tensor in self._written.cut(held, full):
                yield _exported_name(kind, name), tensor if self.is_output_rank else None

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """Base weights with the adapter added in float32, and rounded after that."""
        held = {name: part.tensor for name, part in self._held("master")}
        order: list[str] = []
        for name, _ in self._named_parameters_of("params"):
            product = self._products.get(name)
            order += [name] if product is None else [product.a, product.b, name]
        for name, full in merged(self._in_full((name, held[name]) for name in order), self._products):
            yield name, self._in_export_dtype("params", name, full)

    def _full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Full tensors as the module holds them, in the dtype in which ``kind`` is exported, on every rank."""
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

    @torch.no_grad()
    def _load_held(self, kind: TensorKind, source: TensorSource) -> None:
        """Read this rank's parts from ``source``, which has the names and shapes of the module."""
        for name, part in self._held(kind):
            value = source.read(_exported_name(kind, name), part.region)
            if kind == "exp_avg" or kind == "exp_avg_sq":
                if self.optimizer is not None:
                    set_moment(self.optimizer, self._owned[name], kind, value)
            else:
                part.tensor.copy_(value)


def _exported_name(kind: TensorKind, name: str) -> str:
    """In an adapter, ``peft`` writes the name of a head as it writes all others."""
    prefixed = kind == "adapter" and not name.startswith(ADAPTER_PREFIX)
    return ADAPTER_PREFIX + name if prefixed else name


def _is_float32_head(name: str) -> bool:
    """The scalar heads stay in float32, whatever the compute dtype."""
    return name == "score.weight"
