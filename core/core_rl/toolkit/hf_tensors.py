"""`HFTensors`: the tensors of a Hugging Face module and its optimizer by name, however they are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.meta import TensorKind
from core_rl.backend.named_tensors import TensorSource
from core_rl.state.gather import LocalPart
from core_rl.toolkit.held_tensors import HeldTensors
from core_rl.toolkit.lora import ADAPTER_PREFIX, LowRank, merged, written_name
from core_rl.toolkit.optimizer import moment, set_moment

__all__ = ["HFTensors"]


class HFTensors(HeldTensors):
    """The hooks that stream and load named tensors, over ``self.model`` and ``self.optimizer``."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW | None
    _products: Mapping[str, LowRank]
    _owned: dict[str, nn.Parameter]

    # ------------------------------------------------- how a tensor is spread

    def _local(self, tensor: Tensor) -> LocalPart:
        """What this rank holds of a parameter-shaped ``tensor``; by default all of it."""
        return LocalPart(tensor, (0,) * tensor.dim())

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

    def _held_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        if kind == "buffers":
            return {name: tuple(part.tensor.shape) for name, part in self._held("buffers")}
        return {name: tuple(parameter.shape) for name, parameter in self._named_parameters_of(kind)}

    def _exported_name(self, kind: TensorKind, name: str) -> str:
        """In an adapter, ``peft`` writes the name of a head as it writes all others."""
        prefixed = kind == "adapter" and not name.startswith(ADAPTER_PREFIX)
        return ADAPTER_PREFIX + name if prefixed else name

    def _full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        return self._merged() if kind == "params" and self._products else super()._full_tensors(kind)

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """Base weights with the adapter added in float32, and rounded after that."""
        held = {name: part.tensor for name, part in self._held("master")}
        order: list[str] = []
        for name, _ in self._named_parameters_of("params"):
            product = self._products.get(name)
            order += [name] if product is None else [product.a, product.b, name]
        for name, full in merged(self._in_full((name, held[name]) for name in order), self._products):
            yield name, self._in_export_dtype("params", name, full)

    @torch.no_grad()
    def _load_held(self, kind: TensorKind, source: TensorSource) -> None:
        for name, part in self._held(kind):
            value = source.read(self._exported_name(kind, name), part.region)
            if kind == "exp_avg" or kind == "exp_avg_sq":
                if self.optimizer is not None:
                    set_moment(self.optimizer, self._owned[name], kind, value)
            else:
                part.tensor.copy_(value)
