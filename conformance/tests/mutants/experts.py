"""A mixture of experts: its written form, its gradients, its optimizer and its gates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.reference.train import ReferenceBackend
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.profile import MOE
from mutants.bases import MOMENTS, OwnExport, Packed, TrainContext
from mutants.zoo import Mutant

EXPERTS = int(TinyModel(family=MOE).config().num_experts)


@Mutant("I12.disk", "the order of experts in an export (I12)", "parameters of the export", family=MOE)
class ExpertsInAnotherOrder(OwnExport):
    """Weights are exported with the experts in another order than gradients and moments."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, tensor in super().export_tensors(kind):
            yield _next_expert(name) if kind == "params" else name, tensor


def _next_expert(name: str) -> str:
    return re.sub(r"experts\.(\d+)\.", lambda m: f"experts.{(int(m[1]) + 1) % EXPERTS}.", name)


@Mutant("I10.import", "halves of fused projections (I10)", "parameters after a load", family=MOE)
class GatesForUps(OwnExport):
    """Gate and up projection of an expert are swapped when loaded."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, _Swapped(source))


class _Swapped:
    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        second = re.sub(r"(?<=\d\.)(gate_proj|up_proj)", lambda m: swapped[m[1]], name)
        return self._source.read(second if ".experts." in name else name, slices)


@Mutant(
    "I1.gradients", "gradients of fused experts (I1)", r"layers\.2\.mlp\.experts\.2\.down_proj", family=MOE
)
class OneExpertUntrained(ReferenceBackend):
    """The first expert of a layer gets no gradient: its buffer is reused."""

    def reduce_grads(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name.endswith("2.mlp.experts.down_proj") and parameter.grad is not None:
                parameter.grad[2] = 0


@Mutant("I1.gradients", "a router that never learns (I1)", r"mlp\.gate\.weight", family=MOE)
class RouterUntrained(ReferenceBackend):
    """Gates carry no gradient to the router."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for _, router in _routers(self.model):
            router.register_forward_hook(_detached)


def _detached(
    router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, gates, experts = output
    # Connected, so that there is a gradient, of zero.
    return logits, gates.detach() + 0.0 * gates, experts


def _routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name.endswith("mlp.gate"))


@Mutant("I20.adamw", "an optimizer for sparse gradients (I20)", "experts", family=MOE)
class IdleExpertsKeepStill(ReferenceBackend):
    """An expert that got no token is left out of the optimizer step: it neither decays nor coasts."""

    def step(self, scale: float, lr: float, count: int) -> None:
        idle = {
            name: (parameter.grad.flatten(1) == 0).all(1)
            for name, parameter in self.model.named_parameters()
            if ".experts." in name and parameter.grad is not None
        }
        old = {name: self.model.get_parameter(name).detach().clone() for name in idle}
        super().step(scale, lr, count)
        with torch.no_grad():
            for name, rows in idle.items():
                self.model.get_parameter(name)[rows] = old[name][rows]


@Mutant("I11.portable-round-trip", "moments of fused experts (I11)", "exp_avg after the load", family=MOE)
class ExpertsLoseMoments(OwnExport):
    """The moments of experts, which are many small tensors in a file, are not loaded."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, source)
        for part in self.state().local(kind) if kind in MOMENTS else ():
            if ".experts." in part.name:
                part.tensor.zero_()


@Mutant("I7.logprobs", "a router option that is not read (I7)", "logprobs", family=MOE)
class GatesNotNormalised(ReferenceBackend):
    """``norm_topk_prob`` of the config is not looked at."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for _, router in _routers(self.model):
            router.register_forward_hook(partial(_unnormalised))


def _unnormalised(
    router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, experts = output
    return logits, logits.softmax(-1).gather(1, experts), experts


@Mutant(
    "I7.gates", "gates of Mixtral and of OLMoE", "log-probs with gates that are not normalised", family=MOE
)
class AlwaysNormalises(ReferenceBackend):
    """Gates are divided by their sum, whatever ``norm_topk_prob`` is."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for _, router in _routers(self.model):
            setattr(router, "norm_topk_prob", True)  # noqa: B010  # not declared in its class


@Mutant(
    "I7.gates",
    "Megatron's moe_expert_capacity_factor",
    "log-probs where all tokens choose the same experts",
    family=MOE,
)
class ExpertsHaveACapacity(Packed):
    """An expert takes twice its even share of a micro-batch, and further tokens do without it."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for _, router in _routers(self.model):
            router.register_forward_hook(_dropping)


def _dropping(
    router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, gates, experts = output
    taken = nn.functional.one_hot(experts, EXPERTS).sum(1)
    place = taken.cumsum(0).gather(1, experts)
    return logits, torch.where(place > 2 * experts.numel() / EXPERTS, 0.0, gates), experts
