"""`HFShardedState`: the sharded state of a Hugging Face module and its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from core_rl.backend.tensors import LocalSlice, ShardedState, TensorDict, TensorSource
from core_rl.config.engine import ModelConfig
from core_rl.distributed.comm import Comm
from core_rl.toolkit.build import build_model
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import LocalPart, local_part
from core_rl.toolkit.eight_bit import as_float32, is_eight_bit
from core_rl.toolkit.lora import checkpoint_name, exported_name, has_kind
from core_rl.toolkit.meta_build import build_on_meta
from core_rl.toolkit.optimizer import moments_of

__all__ = ["HFShardedState", "checkpoint_layout", "fill", "planned_model"]

Shape = tuple[int, ...]
Region = tuple[slice, ...]
VALUES = ("params", "master", "adapter")


class HFShardedState:
    """Parameters, gradients, moments and buffers of ``model`` and ``optimizer``, plain tensors or DTensors.

    ``owned`` gives the parameters that the optimizer has, by name: the module's own ones, or this rank's parts of them
    in the same memory. The constructor is collective: ranks with the same box number its replicas. ``optimizer`` has
    its moments already; a rank may have moments of some parameters only (ZeRO-1), and parameters may have moments of
    different kinds. ``layout`` is `checkpoint_layout` of ``model``, where it is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer | None,
        owned: Mapping[str, nn.Parameter],
        world: Comm,
        layout: CheckpointLayout | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._owned = owned
        self._world = world
        self._named = {checkpoint_name(name): p for name, p in model.named_parameters()}
        self._layout = layout or checkpoint_layout(model)
        regions = {name: local_part(parameter).region for name, parameter in self._named.items()}
        self._replicas = _replicas(regions, world)
        stepped: Collection[Tensor] = () if optimizer is None else optimizer.state.keys()
        with_moments = {name: region for name, region in regions.items() if owned.get(name) in stepped}
        self._moment_replicas = _replicas(with_moments, world)
        moments = {} if optimizer is None else {n: moments_of(optimizer, owned[n]) for n in with_moments}
        self._moments = {
            name: kinds for rank_moments in world.gather(moments) for name, kinds in rank_moments.items()
        }
        """The kinds of moments of each parameter, on whichever rank they are."""
        self._kinds = tuple(
            dict.fromkeys(kind for name in self._named for kind in self._moments.get(name, ()))
        )
        self.carried: TensorSource | None = None
        """Tensors of the model's files that the module does not hold."""

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        return self._kinds

    def names(self, parameter: str) -> list[str]:
        """The checkpoint names of the parameter ``parameter``, in-memory and without adapters."""
        return self._layout.names(parameter)

    def shapes(self, kind: str) -> dict[str, Shape]:
        if kind == "buffers":
            return {name: tuple(buffer.shape) for name, buffer in self._saved_buffers()}
        shapes = self._layout.shapes({name: tuple(p.shape) for name, p in self._of(kind)})
        return {exported_name(kind, name): shape for name, shape in shapes.items()}

    def local(self, kind: str) -> Iterator[LocalSlice]:
        if kind == "buffers":
            for name, buffer in self._saved_buffers():
                yield LocalSlice(name, (0,) * buffer.dim(), buffer, self._world.rank)
            return
        replicas = self._moment_replicas if kind in self._kinds else self._replicas
        for name, parameter in self._of(kind):
            if name not in replicas:
                continue
            with self._part(name, parameter, kind) as part:
                for written, offsets, tensor in self._layout.local(name, part, tuple(parameter.shape)):
                    yield LocalSlice(exported_name(kind, written), offsets, tensor, replicas[name])

    def _of(self, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of ``kind``; a tied one comes once."""
        for name, parameter in self._named.items():
            differs = kind in self._kinds and kind not in self._moments.get(name, self._kinds)
            if has_kind(name, kind, trained=parameter.requires_grad) and not differs:
                yield name, parameter

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Not by `state_dict`, where hooks of a module may communicate.
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer

    @contextmanager
    def _part(self, name: str, parameter: nn.Parameter, kind: str) -> Iterator[LocalPart]:
        """This rank's part of the parameter, its gradient or a moment."""
        if kind in VALUES:
            yield local_part(parameter)
        elif kind == "grads":
            grad = parameter.grad
            yield local_part(torch.zeros_like(parameter) if grad is None else grad)
        else:
            assert self._optimizer is not None  # it has the kinds of `optimizer_kinds`
            state = self._optimizer.state[self._owned[name]][kind]
            with as_float32(state) if is_eight_bit(state) else nullcontext(state) as moment:
                if isinstance(moment, DTensor):
                    yield local_part(moment)
                else:
                    yield LocalPart(moment, local_part(parameter).offsets)


def checkpoint_layout(model: PreTrainedModel) -> CheckpointLayout:
    """The checkpoint layout of ``model`` under the checkpoint names of its parameters, without adapters."""
    parameters = {checkpoint_name(name): parameter for name, parameter in model.named_parameters()}
    shapes = {
        name: tuple(p.shape) for name, p in parameters.items() if has_kind(name, "params", trained=False)
    }
    return CheckpointLayout.of(model, shapes)


def planned_model(model: ModelConfig, seed: int) -> tuple[PreTrainedModel, TensorSource]:
    """The transformers model of ``model`` for an engine with modules of its own, and its values by checkpoint name.

    Without memory if its files allow it. Raises as `build_on_meta` and `build_model`.
    """
    # It computes nothing, and every model has this attention.
    unloaded = build_on_meta(model, seed=seed, attn_implementation="eager")
    if unloaded is not None:
        return unloaded.model, unloaded.source
    built = build_model(model, seed=seed, attn_implementation="eager")
    layout = checkpoint_layout(built)
    parameters = ((checkpoint_name(name), parameter.detach()) for name, parameter in built.named_parameters())
    return built, TensorDict(dict(item for name, values in parameters for item in layout.cut(name, values)))


def _replicas(regions: Mapping[str, Region], world: Comm) -> dict[str, int]:
    """The number of lower ranks with the same region of each tensor. Collective."""
    lower = world.gather(regions)[: world.rank]
    return {name: sum(theirs.get(name) == region for theirs in lower) for name, region in regions.items()}


@torch.no_grad()
def fill(state: ShardedState, kind: str, source: TensorSource) -> None:
    """Copy this rank's slices of ``kind`` from ``source``. No collective."""
    for part in state.local(kind):
        part.tensor.copy_(source.read(part.name, part.region))
