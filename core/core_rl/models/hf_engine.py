"""`HFTrainEngine`: the hooks that all engines over one Hugging Face module and one AdamW share.

It is written for replicated tensors. A sharded engine overrides the two methods that say how a
tensor is spread: `_local` and `_copy_world`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.checkpoint.shards import Shard, ShardFiles, copy_shards, write_copies, write_shards
from core_rl.engines.collectives import World
from core_rl.engines.grad_norm import GradShard
from core_rl.engines.meta import StatePart, TensorKind
from core_rl.engines.named_tensors import NamedTensors, TensorSource
from core_rl.engines.train import TrainEngine
from core_rl.models.digest import digest_of_parts
from core_rl.models.gather import LocalPart, ShardGather
from core_rl.models.lora import (
    ADAPTER_PREFIX,
    adapter_config,
    adapter_disabled,
    low_rank_products,
    merged,
    written_name,
)
from core_rl.models.offload import HostCopies, guarded, own_memory
from core_rl.models.optimizer import build_adamw, moment, set_moment, set_step_count
from core_rl.models.written_form import WrittenForm

__all__ = ["HFTrainEngine", "LocalPart"]


class HFTrainEngine(TrainEngine):
    """A `TrainEngine` over ``self.model`` and ``self.optimizer``.

    A subclass writes ``_build`` (which calls `_adopt`), ``_run`` and ``_reduce_grads``. The optimizer
    works on this rank's parts as plain tensors, whatever type the module's parameters have.
    """

    model: PreTrainedModel
    optimizer: torch.optim.AdamW | None

    def _adopt(self, model: PreTrainedModel) -> None:
        """Take a model whose parameters are final (sharded, on their device) and build its optimizer.

        Collective: the ranks tell each other what they hold.
        """
        self.model = model
        self._written = WrittenForm.of(model, self._base_shapes())
        self._products = low_rank_products(model) if self.config.model.lora else {}
        self._on_host: dict[StatePart, ExitStack] = {}
        held = dict(self._held("master"))
        self._owned = {name: self._owned_parameter(p) for name, p in self._named_parameters()}
        config = self.config.optimizer
        trainable = any(parameter.requires_grad for parameter in self._owned.values())
        self.optimizer = build_adamw(self._owned.values(), config) if config and trainable else None
        ranks = self.world.gather({name: part.region for name, part in held.items()})
        self._holders = {
            name: tuple(rank for rank, regions in enumerate(ranks) if regions[name] == part.region)
            for name, part in held.items()
        }
        if self._copy_world().size > 1:
            self._gather = ShardGather(self._copy_world(), held, self._held_shapes("master"))

    def _owned_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part as a parameter for the optimizer, in the same memory."""
        part = self._local(parameter.detach()).tensor
        if part.shape == parameter.shape and type(parameter) is nn.Parameter:
            return parameter
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

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

    def _set_training(self, training: bool) -> None:
        self.model.train(training)

    def _zero_grad(self) -> None:
        for parameter in (*self.model.parameters(), *self._owned.values()):
            parameter.grad = None

    def _grads(self) -> Iterator[tuple[str, Tensor]]:
        """Names and this rank's parts of the gradients that there are."""
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                yield name, self._local(parameter.grad).tensor

    def _grad_shards(self) -> Iterable[GradShard]:
        for name, grad in self._grads():
            yield GradShard(name, grad, self._holders[name])

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def _step(self, scale: float) -> None:
        grads = dict(self._grads())
        if scale != 1.0:
            torch._foreach_mul_(list(grads.values()), scale)
        if self.optimizer is None:
            return
        for name, owned in self._owned.items():
            owned.grad = grads.get(name)
        self.optimizer.step()

    def _set_update_count(self, count: int) -> None:
        if self.optimizer is not None:
            set_step_count(self.optimizer, count)

    # ---------------------------------------------------------------- adapter

    def _adapter_disabled(self) -> AbstractContextManager[None]:
        return adapter_disabled(self.model)

    def _adapter_config(self) -> dict[str, Any]:
        lora = self.config.model.lora
        assert lora is not None  # the core asks only then
        return adapter_config(self.model, lora, self.config.model.head, self.config.model.path)

    def _base_digest(self) -> str:
        adapter = {name for name, _ in self._held("adapter")}
        first = ((name, part.tensor) for name, part in self._held("master") if name not in adapter)
        own = ((name, part) for name, part in first if self.world.rank == min(self._holders[name]))
        return digest_of_parts(self.world, own)

    # ---------------------------------------------------------------- offload

    def _offload(self, part: StatePart) -> None:
        copies, coming_back = HostCopies(), ExitStack()
        coming_back.callback(copies.give_back)
        if part == "model":
            own_memory(p for p in self.model.parameters() if type(p) is nn.Parameter)
            copies.take(self._model_state())
            coming_back.enter_context(guarded(self.model))
        else:
            copies.take(self._optimizer_state())
        self._on_host[part] = coming_back

    def _onload(self, part: StatePart) -> None:
        self._on_host.pop(part).close()

    def _model_state(self) -> Iterator[Tensor]:
        """This rank's weights and gradients."""
        for parameter in self.model.parameters():
            yield self._local(parameter.detach()).tensor
        for _, grad in self._grads():
            yield grad

    def _optimizer_state(self) -> Iterator[Tensor]:
        """This rank's moments; the step counts are on the host in any case."""
        for state in self.optimizer.state.values() if self.optimizer else ():
            yield from (value for name, value in state.items() if name != "step")

    # ------------------------------------------------------ sharded checkpoint

    def _save_shards(self, directory: Path, with_optimizer: bool) -> None:
        write_shards(directory, self.world.rank, self._shards(with_optimizer), self.world.size)

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        copies = copy_shards(self.world.rank, self._shards(with_optimizer))
        return partial(write_copies, rank=self.world.rank, copies=copies, world_size=self.world.size)

    def _snapshot_tensors(self, kinds: Sequence[TensorKind]) -> list[Shard] | None:
        if "params" in kinds and self._products:
            return None  # merged weights are no parts of what is held
        if any(self._held_shapes(kind) != self._tensor_shapes(kind) for kind in kinds):
            return None  # tensors that are written in another form than they are held in
        return copy_shards(self.world.rank, (part for kind in kinds for part in self._exported_parts(kind)))

    def _exported_parts(self, kind: TensorKind) -> Iterator[Shard]:
        """This rank's parts in the dtype in which ``kind`` is exported; of copies, one rank has them."""
        shapes = self._held_shapes(kind)
        for name, part in self._held(kind):
            if self.world.rank == (0 if kind == "buffers" else min(self._holders[name])):
                tensor = self._in_export_dtype(kind, name, part.tensor)
                yield Shard(f"{kind}/{name}", tensor, shapes[name], part.offsets)

    def _shards(self, with_optimizer: bool) -> Iterator[Shard]:
        kinds: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq", "buffers")
        for kind in kinds if with_optimizer else ("master", "buffers"):
            yield from self._exported_parts(kind)
        if with_optimizer:
            yield from self._random_state()

    def _random_state(self) -> Iterator[Shard]:
        state = torch.get_rng_state()
        yield Shard(self._rng_name(self.world.rank), state, tuple(state.shape), (0,))
        if self.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.device)
            yield Shard(self._rng_name(self.world.rank, "cuda"), state, tuple(state.shape), (0,))

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        files = ShardFiles(directory)
        self._load_held("master", _Prefixed(files, "master/"))
        self._load_held("buffers", _Prefixed(files, "buffers/"))
        if with_optimizer:
            self._load_held("exp_avg", _Prefixed(files, "exp_avg/"))
            self._load_held("exp_avg_sq", _Prefixed(files, "exp_avg_sq/"))
            self._load_random_state(files)

    def _load_random_state(self, files: ShardFiles) -> None:
        # It goes on exactly only where the number of ranks is the same.
        last, none = self._rng_name(self.world.size - 1), self._rng_name(self.world.size)
        if last not in files.names() or none in files.names():
            return
        torch.set_rng_state(files.read(self._rng_name(self.world.rank)))
        own = self._rng_name(self.world.rank, "cuda")
        if self.device.type == "cuda" and own in files.names():
            torch.cuda.set_rng_state(files.read(own), self.device)

    @staticmethod
    def _rng_name(rank: int, device: str = "cpu") -> str:
        return f"rng/{device}/{rank}"


class _Prefixed:
    """The part of a source whose names begin with ``prefix``, without it."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def names(self) -> list[str]:
        return [n.removeprefix(self._prefix) for n in self._source.names() if n.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._prefix + name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self._source.read(self._prefix + name, slices)


def _exported_name(kind: TensorKind, name: str) -> str:
    """In an adapter, ``peft`` writes the name of a head as it writes all others."""
    prefixed = kind == "adapter" and not name.startswith(ADAPTER_PREFIX)
    return ADAPTER_PREFIX + name if prefixed else name


def _is_float32_head(name: str) -> bool:
    """The scalar heads stay in float32, whatever the compute dtype."""
    return name == "score.weight"
