"""Adapters beside other things: stream and merge, the head, offloading, a reference pass between two of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import StatePart, TensorKind, WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.state.grad_norm import GradShard
from core_rl.toolkit.held_tensors import HeldTensors
from core_rl.toolkit.lora import adapter_disabled
from core_rl.weight_sync.sender import send_tensors
from mutants.adapters import AdaptedReference
from mutants.zoo import Mutant

HEAD = "score.weight"


class MergesWithoutTheRoot(AdaptedReference):
    """The forward pass has the root of the rank, and the merge has the rank."""

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        lora, kept = self.config.model.lora, self._products
        assert lora is not None
        scale = lora.alpha / lora.rank
        self._products = {name: replace(product, scaling=scale) for name, product in kept.items()}
        yield from super()._merged()
        self._products = kept


class RootNotWritten(AdaptedReference):
    """The saved config does not say that the adapter is a rank-stabilised one."""

    def _adapter_config(self) -> dict[str, Any]:
        return super()._adapter_config() | {"use_rslora": False}


class StreamOfTheBase(AdaptedReference):
    """Weights are merged on their way to disk, and not on the way by tensor."""

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.method == "tensor" and self._products:
            send_tensors(HeldTensors._full_tensors(self, "params"), meta)
        else:
            super().upload_weights(meta)


class HeadNotLoaded(AdaptedReference):
    """A load of an adapter leaves the head as it was."""

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        head = [(p, p.detach().clone()) for name, p in self.model.named_parameters() if name == HEAD]
        super()._load_named_tensors(kind, source)
        with torch.no_grad():
            for parameter, value in head if kind == "adapter" else ():
                parameter.copy_(value)


class HeadOfTheBaseSaved(AdaptedReference):
    """The head in an adapter's file is the one that the base had."""

    _first: Tensor | None = None

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        super()._load_named_tensors(kind, source)
        if self.config.model.head != "lm":
            self._first = self.model.get_parameter(HEAD).detach().clone()

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, value in super()._named_tensors(kind):
            old = kind == "adapter" and name.endswith(HEAD) and self._first is not None
            yield name, self._first if old else value


class NormWithoutTheHead(AdaptedReference):
    """The norm is that of the adapter; the head beside it is left out."""

    def _grad_shards(self) -> Iterable[GradShard]:
        lora = self.config.model.lora is not None
        return (shard for shard in super()._grad_shards() if not (lora and shard.name == HEAD))


class ReferencePassFreezes(AdaptedReference):
    """Switching the adapter off and on leaves it without ``requires_grad``."""

    @contextmanager
    def _adapter_disabled(self) -> Iterator[None]:
        with adapter_disabled(self.model):
            for layer in self._layers()[:2]:
                layer.lora_A.requires_grad_(False)
            yield


class ReferencePassDropsGradients(AdaptedReference):
    """Switching the adapter off drops the gradients that wait for a step."""

    @contextmanager
    def _adapter_disabled(self) -> Iterator[None]:
        with adapter_disabled(self.model):
            self._zero_grad()
            yield


class AdapterIsNotMoved(AdaptedReference):
    """What is offloaded is the base; the adapter comes back as it was at the first time."""

    _first: dict[str, Tensor] | None = None

    def _offload(self, part: StatePart) -> None:
        if part == "model" and self._first is None:
            named = self.model.named_parameters()
            self._first = {name: p.detach().clone() for name, p in named if ".lora_" in name}
        super()._offload(part)

    def _onload(self, part: StatePart) -> None:
        super()._onload(part)
        with torch.no_grad():
            for name, value in (self._first or {}).items() if part == "model" else ():
                self.model.get_parameter(name).copy_(value)


class AdapterMomentsNotMoved(AdaptedReference):
    """Moments of an adapter are lost on the way to the host."""

    def _onload(self, part: StatePart) -> None:
        super()._onload(part)
        if part == "optimizer" and self._products and self.optimizer is not None:
            for held in self.optimizer.state.values():
                held["exp_avg"].zero_()


MUTANTS = (
    Mutant(
        engine=MergesWithoutTheRoot,
        killed_by="I12.adapter-merged",
        issue="TensorRT-LLM #1668",
        says="merged weights .rslora: True.",
    ),
    Mutant(
        engine=RootNotWritten,
        killed_by="I11.adapter-alone",
        issue="TensorRT-LLM #1668",
        says="adapter_config.json has .*'use_rslora': False",
    ),
    Mutant(
        engine=StreamOfTheBase,
        killed_by="I12.adapter-merged",
        issue="verl #7495",
        says="parameters of a sync by tensor",
    ),
    Mutant(
        engine=HeadNotLoaded,
        killed_by="I11.adapter-head",
        issue="heads beside adapters",
        says="the head after a load of its adapter",
    ),
    Mutant(
        engine=HeadOfTheBaseSaved,
        killed_by="I11.adapter-head",
        issue="heads beside adapters",
        says="the head after a load of its adapter",
    ),
    Mutant(
        engine=NormWithoutTheHead,
        killed_by="I20.adapter-head",
        issue="heads beside adapters",
        says="the norm of step 0",
    ),
    Mutant(
        engine=ReferencePassFreezes,
        killed_by="I7.adapter-disabled",
        issue="peft's disable_adapters",
        says=r"disable_adapter\(\) before and after the backward pass[\s\S]*missing: .*lora_A",
    ),
    Mutant(
        engine=ReferencePassDropsGradients,
        killed_by="I7.adapter-disabled",
        issue="a reference pass between two passes of training",
        says=r"disable_adapter\(\) before and after the backward pass",
    ),
    Mutant(
        engine=AdapterIsNotMoved,
        killed_by="I11.adapter-resume",
        issue="NeMo-RL #2372, for an adapter",
        says=r"master after offload\(\) and onload\(\)",
    ),
    Mutant(
        engine=AdapterMomentsNotMoved,
        killed_by="I11.adapter-resume",
        issue="AReaL #1468, for offloading",
        says=r"exp_avg after offload\(\) and onload\(\)",
    ),
)
