"""Adapters combined with other features: stream, merge, head, offloading, a reference pass between training passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import StatePart, WeightUpdateMeta
from core_rl.backend.protocols import LowRank
from core_rl.backend.tensors import LocalSlice, NamedTensors, TensorSource
from mutants.adapters import NAME, AdaptedReference
from mutants.bases import OwnExport, OwnNorm, OwnOffload, TrainContext
from mutants.unchanged import unchanged
from mutants.uploads import Sends, Whole
from mutants.zoo import Mutant

HEAD = "score.weight"


@Mutant("I12.adapter-merged", "TensorRT-LLM #1668", "merged weights .rslora: True.")
class MergesWithoutTheRoot(AdaptedReference):
    """The forward pass has the root of the rank, and the merge has the rank."""

    def low_rank(self) -> Mapping[str, LowRank]:
        lora = self.context.config.model.lora
        assert lora is not None
        scale = lora.alpha / lora.rank
        return {name: replace(product, scaling=scale) for name, product in super().low_rank().items()}


@Mutant("I12.adapter-merged", "a merge in bfloat16 (I12)", "are other bfloat16 numbers", dtype="bfloat16")
class MergesRoundedParts(AdaptedReference, OwnExport):
    """In bfloat16, base and product are rounded before they are added."""

    def export_tensors(self, kind: str) -> NamedTensors:
        master = {part.name: part.tensor.detach().float() for part in self.state().local("master")}
        products = self.low_rank() if kind == "params" else {}
        for name, value in super().export_tensors(kind):
            if value is None or name not in products:
                yield name, value
                continue
            product, whole = products[name], tuple(slice(0, size) for size in value.shape)
            zero = torch.zeros_like(master[name])
            delta = product.added_to(zero, master[product.a], master[product.b], whole)
            yield name, master[name].to(value.dtype) + delta.to(value.dtype)


@Mutant("I11.adapter-alone", "TensorRT-LLM #1668", "adapter_config.json has .*'use_rslora': False")
class RootNotWritten(AdaptedReference):
    """The saved config does not mark the adapter as rank-stabilised."""

    def adapter_config(self) -> dict[str, Any]:
        return super().adapter_config() | {"use_rslora": False}


@Mutant("I12.adapter-merged", "verl #7495", "parameters of a sync by tensor")
class StreamOfTheBase(AdaptedReference, Sends):
    """Weights are merged on their way to disk, and not on the way by tensor."""

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        return self.base() if meta.method == "tensor" else tensors


@Mutant("I11.adapter-head", "heads beside adapters", "the head after a load of its adapter")
class HeadNotLoaded(AdaptedReference, OwnExport):
    """A load of an adapter leaves the head as it was."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        with unchanged(p for p in self.state().local("master") if kind == "adapter" and p.name == HEAD):
            super().import_tensors(kind, source)


@Mutant("I11.adapter-head", "heads beside adapters", "the head after a load of its adapter")
class HeadOfTheBaseSaved(AdaptedReference, OwnExport):
    """The head in an adapter's file is the base's."""

    first: Tensor | None = None

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, source)
        if self.context.config.model.head != "lm":
            self.first = self.model.get_parameter(HEAD).detach().clone()

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            old = kind == "adapter" and name.endswith(HEAD) and self.first is not None
            yield name, self.first if old else value


@Mutant("I20.adapter-modes", "heads beside adapters", "the norm of step 0")
class NormWithoutTheHead(AdaptedReference, OwnNorm):
    """The norm is that of the adapter; the head is left out."""

    def counted(self) -> Iterable[LocalSlice]:
        lora = self.context.config.model.lora is not None
        return (part for part in super().counted() if not (lora and part.name == HEAD))


@Mutant("I20.adapter-modes", "peft's disable_adapters", r"of step 0 .*lora_A")
class ReferencePassFreezes(AdaptedReference):
    """Switching the adapter off and on leaves it without ``requires_grad``."""

    def set_adapter(self, enabled: bool) -> None:
        super().set_adapter(enabled)
        for layer in self.layers()[:2]:
            layer.lora_A.requires_grad_(False)


@Mutant(
    "I20.adapter-modes",
    "a reference pass between two passes of training",
    "changes dropout or training|gradients .*of step 0 ",
)
class ReferencePassDropsGradients(AdaptedReference):
    """Switching the adapter off drops the gradients that wait for a step."""

    def set_adapter(self, enabled: bool) -> None:
        super().set_adapter(enabled)
        if not enabled:
            self.zero_grad()


class _Switches(AdaptedReference):
    """Switching the adapter off changes something else."""

    def set_adapter(self, enabled: bool) -> None:
        super().set_adapter(enabled)
        if not enabled:
            self.change()

    def change(self) -> None:
        """The change."""
        raise NotImplementedError


@Mutant("I20.adapter-modes", "eval() of the base for a reference pass", "changes dropout or training")
class SwitchEndsDropoutOfBase(_Switches):
    """Dropout of the base stays off."""

    def change(self) -> None:
        modules: list[Any] = [*self.model.modules()]
        for module in modules:
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0


@Mutant("I20.adapter-modes", "eval() for a reference pass", "changes dropout or training")
class SwitchEndsDropoutOfAdapter(_Switches):
    """Dropout of the adapter stays off."""

    def change(self) -> None:
        for layer in self.layers():
            layer.lora_dropout = torch.nn.ModuleDict({NAME: torch.nn.Identity()})


@Mutant("I20.adapter-modes", "merge for a reference pass", "not just the trained parameters|differs|frozen")
class SwitchTrainsBase(_Switches):
    """The base is trained from then on."""

    def change(self) -> None:
        self.model.requires_grad_(True)
        self.adopt(self.model, self.context)


@Mutant("I20.adapter-modes", "an optimizer that is built again", "exp_avg|weights after steps")
class SwitchDropsMoments(_Switches):
    """The moments are lost."""

    def change(self) -> None:
        assert self.optimizer is not None
        self.optimizer.state.clear()


@Mutant(
    "I20.adapter-modes", "requires_grad of a head", "not just the trained parameters.*score|missing: score"
)
class SwitchFreezesHead(_Switches):
    """The head is frozen from then on."""

    def change(self) -> None:
        if self.context.config.model.head != "lm":
            self.model.get_parameter(HEAD).requires_grad_(False)


@Mutant("I20.adapter-modes", "requires_grad of a frozen head", "score")
class SwitchTrainsFrozenHead(_Switches):
    """A head that the config freezes is trained from then on."""

    def change(self) -> None:
        if self.context.config.model.head != "lm":
            self.model.get_parameter(HEAD).requires_grad_(True)


@Mutant("I11.adapter-resume", "NeMo-RL #2372, for an adapter", r"master after offload\(\) and onload\(\)")
class AdapterIsNotMoved(AdaptedReference, OwnOffload):
    """Offloading takes the base; the adapter comes back as it was at the first time."""

    first: dict[str, Tensor] | None = None

    def offload(self, part: StatePart) -> None:
        if part == "model" and self.first is None:
            parameters = self.model.named_parameters()
            self.first = {name: p.detach().clone() for name, p in parameters if ".lora_" in name}
        super().offload(part)

    def onload(self, part: StatePart) -> None:
        super().onload(part)
        with torch.no_grad():
            for name, value in (self.first or {}).items() if part == "model" else ():
                self.model.get_parameter(name).copy_(value)


@Mutant("I11.adapter-resume", "AReaL #1468, for offloading", r"exp_avg after offload\(\) and onload\(\)")
class AdapterMomentsNotMoved(AdaptedReference, OwnOffload):
    """Moments of an adapter are lost on the way to the host."""

    def onload(self, part: StatePart) -> None:
        super().onload(part)
        if part == "optimizer" and self.layers():
            for moment in self.state().local("exp_avg"):
                moment.tensor.zero_()


@Mutant(
    "I20.combinations",
    "groups of an optimizer by the names of a module, which an adapter renames",
    "the load, with adapter: .*, rules: second layer",
)
class AdapterIgnoresRules(AdaptedReference):
    """Rules hold, and do not where there is an adapter."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        optimizer = context.config.optimizer
        if context.config.model.lora is None or optimizer is None or not optimizer.rules:
            return
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["weight_decay"] = optimizer.weight_decay
