"""`MegatronTensors`: Megatron's weights, gradients and moments under the names that transformers writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.meta import TensorKind
from core_rl.backend.tensors import TensorDict, TensorSource
from core_rl.checkpoint.shards import Shard, ShardFiles
from core_rl.distributed.comm import Comm
from core_rl.errors import ConfigError
from core_rl.state.gather import LocalPart, ShardGather
from core_rl.state.grad_norm import GradShard
from core_rl.toolkit.checkpoint_layout import WrittenForm
from core_rl.toolkit.held_checkpoint import HeldCheckpoint
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.modules import PackedGPT
from core_rl_megatron.naming import Placement, Slot, placements
from core_rl_megatron.places import Places, TrackedDraws
from core_rl_megatron.state import OptimizerState

__all__ = ["MegatronTensors", "Written", "written_weights"]

MOMENTS = ("exp_avg", "exp_avg_sq")
AS_WRITTEN = WrittenForm({})
"""Names and shapes here are the written ones already."""


class Written:
    """What transformers writes of a model: names, shapes, and which tensors are trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.form = WrittenForm.of(model)
        held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.shapes = self.form.shapes(held)
        self.trained = frozenset(
            written
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            for written in self.form.names(name)
        )


def written_weights(model: PreTrainedModel, written: Written) -> TensorSource:
    """The weights of a model in memory, under the names that it writes."""
    return TensorDict(
        {
            name: tensor
            for held, parameter in model.named_parameters()
            for name, tensor in written.form.cut(held, parameter.detach())
        }
    )


class MegatronTensors(HeldCheckpoint):
    """The hooks that stream, load and save named tensors, over Megatron's model chunks and optimizer."""

    config: MegatronConfig
    _places: Places
    _tracked: TrackedDraws
    _hf: PretrainedConfig
    _names: Written
    _optimizer_state: OptimizerState | None

    def _adopt(self, chunks: Sequence[PackedGPT]) -> None:
        """Take parameters that are final: frozen or not, in their dtype, where they stay. Collective."""
        self._written = AS_WRITTEN
        rank, expert = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
        self._placements = [place for chunk in chunks for place in placements(chunk, rank, expert)]
        self._slots: dict[str, tuple[nn.Parameter, Slot]] = {
            slot.name: (place.parameter, slot) for place in self._placements for slot in place.slots
        }
        # The optimizer has a float32 copy of what is trained in bfloat16; the rest needs one as well.
        self._frozen = {
            place.parameter: place.parameter.detach().float()
            for place in self._placements
            if place.parameter.dtype != torch.float32 and not self._is_trained(place.parameter)
        }
        parts = {name: LocalPart(self._shape_only(name), self._offsets(name)) for name in self._names.shapes}
        own = {name: part.region for name, part in parts.items() if name in self._slots}
        theirs = self.world.gather(own)
        self._holders = {name: _holders(name, own.get(name), theirs) for name in self._names.shapes}
        if self._places.copy.size > 1:
            self._gather = ShardGather(self._places.copy, parts, self._names.shapes)

    def _is_trained(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and self.config.optimizer is not None

    # ------------------------------------------------------------ what is held

    def _hf_config(self) -> PretrainedConfig:
        return self._hf

    def _copy_world(self) -> Comm:
        return self._places.copy

    def _held_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        if kind == "buffers":
            return {}
        everything = kind in ("params", "master")
        return {n: shape for n, shape in self._names.shapes.items() if everything or n in self._names.trained}

    def _held(self, kind: TensorKind) -> Iterator[tuple[str, LocalPart]]:
        last: tuple[nn.Parameter, Tensor] | None = None
        for name in self._held_shapes(kind):
            if name not in self._slots:
                yield name, LocalPart(self._shape_only(name), self._offsets(name))
                continue
            parameter, slot = self._slots[name]
            # Queries, keys and values come one after the other out of one parameter.
            if last is None or last[0] is not parameter:
                last = (parameter, self._quantity(parameter, kind))
            yield name, LocalPart(slot.of(last[1]), slot.offsets)

    def _quantity(self, parameter: nn.Parameter, kind: TensorKind) -> Tensor:
        """``kind`` of all of this rank's ``parameter``."""
        if kind == "params":
            return parameter.detach()
        if kind == "master":
            if parameter in self._frozen:
                return self._frozen[parameter]
            if parameter.dtype == torch.float32:
                return parameter.detach()
        assert kind != "buffers" and kind != "adapter"  # there are none
        assert self._optimizer_state is not None  # the core asks only then
        return self._optimizer_state.read(parameter, kind)

    def _shape_only(self, name: str) -> Tensor:
        """A tensor without elements, or one without memory in the shape of this rank's part."""
        shape = self._names.shapes[name]
        if name not in self._slots:
            return torch.empty((0, *shape[1:]), device=self.device)
        parameter, slot = self._slots[name]
        return torch.empty(slot.shape(parameter), device="meta")

    def _offsets(self, name: str) -> tuple[int, ...]:
        if name not in self._slots:
            return (0,) * len(self._names.shapes[name])
        return self._slots[name][1].offsets

    # ----------------------------------------------------------------- loading

    @torch.no_grad()
    def _load_held(self, kind: TensorKind, source: TensorSource) -> None:
        if kind == "buffers":
            return
        for place in self._placements:
            if kind in MOMENTS and not self._is_trained(place.parameter):
                continue
            self._set(place.parameter, kind, self._read(place, source))

    def _read(self, place: Placement, source: TensorSource) -> Tensor:
        """Float32, in the shape of the parameter; padding is 0."""
        value = torch.zeros(place.parameter.shape, dtype=torch.float32, device=self.device)
        for slot in place.slots:
            region = LocalPart(torch.empty(slot.shape(value), device="meta"), slot.offsets).region
            slot.write(value, source.read(slot.name, region))
        return value

    def _set(self, parameter: nn.Parameter, kind: TensorKind, value: Tensor) -> None:
        state = self._optimizer_state
        if kind == "exp_avg" or kind == "exp_avg_sq":
            assert state is not None  # the parameter is trained
            state.write(parameter, kind, value)
            return
        parameter.detach().copy_(value)
        if parameter in self._frozen:
            self._frozen[parameter].copy_(value)
        elif state is not None:
            state.write(parameter, "master", value)

    # ------------------------------------------------------------- gradients

    def _find_duplicates(self) -> None:
        """Learn which ranks work on the same part of a gradient. Collective."""
        assert self._optimizer_state is not None  # called for a trained model
        keys = {key: None for _, _, key in self._gradients()}
        ranks: dict[object, list[int]] = {}
        for rank, theirs in enumerate(self.world.gather(list(keys))):
            for key in theirs:
                ranks.setdefault(key, []).append(rank)
        self._same_part: Mapping[object, tuple[int, ...]] = {key: tuple(ranks[key]) for key in keys}

    def _gradients(self) -> Iterator[tuple[str, Tensor, object]]:
        """Names, this rank's parts, and what tells one part from another."""
        assert self._optimizer_state is not None  # called for a trained model
        slots = {place.parameter: place.slots for place in self._placements}
        for parameter, grad in self._optimizer_state.gradients():
            owned = self._optimizer_state.owned(parameter)
            assert owned is not None  # it has a gradient here
            own = tuple((slot.name, slot.offsets) for slot in slots[parameter])
            yield own[0][0], grad, (own, owned.start, owned.stop)

    def _grad_shards(self) -> Iterable[GradShard]:
        for name, grad, key in self._gradients():
            yield GradShard(name, grad, self._same_part[key])

    # ----------------------------------------------------------- random state

    def _random_state(self) -> Iterator[Shard]:
        yield from super()._random_state()
        for name, state in self._tracked.states.items():
            yield Shard(self._rng_name(self.world.rank, name), state, tuple(state.shape), (0,))

    def _load_random_state(self, files: ShardFiles) -> None:
        super()._load_random_state(files)
        names = {name: self._rng_name(self.world.rank, name) for name in self._tracked.states}
        if files.world_size == self.world.size and all(place in files.names() for place in names.values()):
            self._tracked.states = {name: files.read(place) for name, place in names.items()}


def _holders(
    name: str, own: tuple[slice, ...] | None, theirs: Sequence[Mapping[str, tuple[slice, ...]]]
) -> tuple[int, ...]:
    """The ranks that hold the part ``own`` of ``name``, or any of it where this rank holds nothing."""
    return tuple(
        rank for rank, regions in enumerate(theirs) if name in regions and own in (None, regions[name])
    )


def freeze(placement: Placement, trained: frozenset[str]) -> None:
    """Turn the gradient of a parameter off if none of its tensors is trained.

    Raises `ConfigError` where only some are: Megatron holds them in one parameter.
    """
    found = [slot.name for slot in placement.slots if slot.name in trained]
    if found and len(found) < len(placement.slots):
        others = [slot.name for slot in placement.slots if slot.name not in trained]
        raise ConfigError(
            f"model.frozen matches {others}, which Megatron holds in one parameter with {found}; "
            "freeze all of these or none"
        )
    placement.parameter.requires_grad_(bool(found))
