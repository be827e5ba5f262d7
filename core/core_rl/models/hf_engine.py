"""`HFTrainEngine`: the hooks that all engines over one Hugging Face module and one AdamW share.

It is written for replicated tensors. A sharded engine overrides the three methods that say how a
tensor is spread: `_local`, `_copy_world` and `_holders`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.checkpoint.shards import Shard, ShardFiles, write_shards
from core_rl.engines.collectives import World
from core_rl.engines.grad_norm import GradShard
from core_rl.engines.meta import TensorKind
from core_rl.engines.named_tensors import NamedTensors, TensorSource
from core_rl.engines.train import TrainEngine
from core_rl.models.gather import LocalPart, ShardGather
from core_rl.models.optimizer import build_adamw, moment, set_moment, set_step_count

__all__ = ["HFTrainEngine", "LocalPart"]


class HFTrainEngine(TrainEngine):
    """A `TrainEngine` over ``self.model`` and ``self.optimizer``.

    A subclass writes ``_build`` (which calls `_adopt`), ``_run`` and ``_reduce_grads``.
    """

    model: PreTrainedModel
    optimizer: torch.optim.AdamW | None

    def _adopt(self, model: PreTrainedModel) -> None:
        """Take a model whose parameters are final (sharded, on their device) and build its optimizer."""
        self.model = model
        config = self.config.optimizer
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        self.optimizer = build_adamw(model.named_parameters(), config) if config and trainable else None
        if self._copy_world().size > 1:
            held = {name: self._local(tensor) for name, tensor in self._held("master")}
            self._gather = ShardGather(self._copy_world(), held, self._tensor_shapes("master"))

    # ------------------------------------------------- how a tensor is spread

    def _local(self, tensor: Tensor) -> LocalPart:
        """What this rank holds of a parameter-shaped ``tensor``; by default all of it."""
        return LocalPart(tensor, (0,) * tensor.dim())

    def _copy_world(self) -> World:
        """The ranks that hold one copy of all tensors between them; by default this one alone."""
        return World()

    def _holders(self, tensor: Tensor) -> tuple[int, ...]:
        """The ranks that hold the same part of ``tensor`` as this one; by default all ranks."""
        return tuple(range(self.world.size))

    # ----------------------------------------------------------------- hooks

    def _hf_config(self) -> PretrainedConfig:
        return self.model.config

    def _held(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Names and this rank's tensors of ``kind``; a tied parameter comes once."""
        if kind == "buffers":
            written = self.model.state_dict().keys()
            yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in written)
            return
        for name, parameter in self.model.named_parameters():
            if kind in ("params", "master"):
                yield name, parameter.detach()
            elif parameter.requires_grad:
                yield name, self._quantity(parameter, kind)

    def _quantity(self, parameter: nn.Parameter, kind: TensorKind) -> Tensor:
        if kind == "exp_avg" or kind == "exp_avg_sq":
            if self.optimizer is None:
                return torch.zeros_like(parameter, requires_grad=False)
            return moment(self.optimizer, parameter, kind)
        return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad

    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        if kind == "buffers":
            return {name: tuple(buffer.shape) for name, buffer in self._held("buffers")}
        return {
            name: tuple(parameter.shape)
            for name, parameter in self.model.named_parameters()
            if kind in ("params", "master") or parameter.requires_grad
        }

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        stream: Iterable[tuple[str, Tensor]] = self._held(kind)
        if kind != "buffers":
            stream = self._full_tensors(kind)
        for name, full in stream:
            yield name, full if self.is_output_rank else None

    def _full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, in the dtype in which ``kind`` is exported."""
        compute = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        parts = (
            (
                name,
                self._local(tensor).tensor.to(
                    compute if kind == "params" and not _is_float32_head(name) else torch.float32
                ),
            )
            for name, tensor in self._held(kind)
        )
        if self._copy_world().size == 1:
            return parts
        return self._gather.stream(parts)

    @torch.no_grad()
    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in self._held(kind):
            part = self._local(tensor)
            value = source.read(name, part.region)
            if kind == "exp_avg" or kind == "exp_avg_sq":
                if self.optimizer is not None:
                    set_moment(self.optimizer, parameters[name], kind, self._like(tensor, value))
            else:
                part.tensor.copy_(value)

    def _like(self, tensor: Tensor, local: Tensor) -> Tensor:
        """A tensor spread as ``tensor`` is, with this rank's part set to ``local``."""
        result = torch.empty_like(tensor)
        self._local(result).tensor.copy_(local)
        return result

    def _set_training(self, training: bool) -> None:
        self.model.train(training)

    def _zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def _grad_shards(self) -> Iterable[GradShard]:
        for name, grad in self._grads():
            yield GradShard(name, self._local(grad).tensor, self._holders(grad))

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def _step(self, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([self._local(grad).tensor for _, grad in self._grads()], scale)
        if self.optimizer is not None:
            self.optimizer.step()

    def _set_update_count(self, count: int) -> None:
        if self.optimizer is not None:
            set_step_count(self.optimizer, count)

    # ------------------------------------------------------ sharded checkpoint

    def _save_shards(self, directory: Path, with_optimizer: bool) -> None:
        write_shards(directory, self.world.rank, self._shards(with_optimizer), self.world.size)

    def _shards(self, with_optimizer: bool) -> Iterator[Shard]:
        kinds: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq", "buffers")
        for kind in kinds if with_optimizer else ("master", "buffers"):
            for name, tensor in self._held(kind):
                if self.world.rank == min(self._holders(tensor), default=self.world.rank):
                    part = self._local(tensor)
                    yield Shard(f"{kind}/{name}", part.tensor, tuple(tensor.shape), part.offsets)
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
        self._load_named_tensors("master", _Prefixed(files, "master/"))
        self._load_named_tensors("buffers", _Prefixed(files, "buffers/"))
        if with_optimizer:
            self._load_named_tensors("exp_avg", _Prefixed(files, "exp_avg/"))
            self._load_named_tensors("exp_avg_sq", _Prefixed(files, "exp_avg_sq/"))
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


def _is_float32_head(name: str) -> bool:
    """The scalar heads stay in float32, whatever the compute dtype."""
    return name == "score.weight"
