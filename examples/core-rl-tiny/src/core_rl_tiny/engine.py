"""The engine: a backend over a module of its own, and the description of each rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.errors import CheckpointError, ConfigError, WeightsError
from core_rl.toolkit import (
    BuildContext,
    LocalSlice,
    MicroBatchStep,
    ModelConfig,
    ModelOutput,
    PassMode,
    SequenceBatch,
    TensorDict,
    TensorFiles,
    TensorSource,
    TrainBackend,
    TrainEngineConfig,
    build_adamw,
    build_model,
    check_source,
    moment_kinds,
    read_config,
    set_step_count,
)
from core_rl_tiny.model import Llama, Rows


@dataclass(frozen=True)
class TinyState:
    """Every rank holds every tensor: its number is that of the replica."""

    model: Llama
    optimizer: torch.optim.Optimizer | None
    rank: int

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        return () if self.optimizer is None else moment_kinds(self.optimizer)

    @property
    def carried(self) -> None:
        return None  # `_load` refuses files with other tensors

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        if kind in ("buffers", "adapter"):
            return {}
        return {part.name: tuple(part.parameter[part.rows].shape) for part in self.model.checkpoint()}

    def local(self, kind: str) -> Iterator[LocalSlice]:
        for part in self.model.checkpoint() if self.shapes(kind) else ():
            tensor = self._values(part, kind)[part.rows]
            yield LocalSlice(part.name, (0,) * tensor.dim(), tensor, self.rank)

    def _values(self, part: Rows, kind: str) -> Tensor:
        """The parameter, its gradient or a moment."""
        if kind in ("params", "master"):
            return part.parameter.detach()
        if kind == "grads":
            return torch.zeros_like(part.parameter) if part.parameter.grad is None else part.parameter.grad
        assert self.optimizer is not None  # it has the kinds of `optimizer_kinds`
        moment: Tensor = self.optimizer.state[part.parameter][kind]
        return moment


class TinyBackend(TrainBackend[TrainEngineConfig]):
    """Every rank has the whole model, and runs it on its own sequences, one at a time."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        self.group = context.groups.data_parallel
        self.config = read_config(context.config.model)
        context.check_model(self.config)
        self.model = Llama(self.config)
        self.config.architectures = ["LlamaForCausalLM"]
        _load(TinyState(self.model, None, 0), context.config.model, context.seed)
        self.model.to(context.device)
        optimizer_config = context.config.optimizer
        self.optimizer = build_adamw(self.model.parameters(), optimizer_config) if optimizer_config else None

    def hf_config(self) -> PretrainedConfig:
        return self.config

    def state(self) -> TinyState:
        return TinyState(self.model, self.optimizer, self.group.rank)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            rows = [self.outputs(ids, step) for ids in micro_batch.input_ids.split(micro_batch.lengths)]
            output = ModelOutput(**{name: torch.cat([row[name] for row in rows]) for name in step.outputs})
            loss = step(output, micro_batch)
            if mode != "forward":
                loss.backward()

    def outputs(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """The outputs of one sequence ``[L]``: outputs of a token come from the logits at the token before it."""
        logits = self.model(ids)[:-1] / step.temperature
        log_p = F.log_softmax(logits, dim=-1)
        return {
            "logprobs": F.pad(log_p.gather(1, ids[1:, None]).squeeze(1), (1, 0)),
            "entropy": F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0)),
            "logits": F.pad(logits, (0, 0, 1, 0)),
        }

    def set_training(self, training: bool) -> None:
        self.model.train(training)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def reduce_grads(self) -> None:
        if self.group.size == 1:
            return
        for parameter in self.model.parameters():
            if parameter.grad is None:  # this rank had no sequence
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group.group)

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None  # the core steps only with one
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        set_step_count(self.optimizer, count - 1)
        self.optimizer.step()

    def after_load(self, kinds: frozenset[str]) -> None:
        """The module computes with the master weights themselves."""


@torch.no_grad()
def _load(state: TinyState, model: ModelConfig, seed: int) -> None:
    """Fill the parameters from the files of ``model.path``; without one, with what every engine draws from ``seed``."""
    source: TensorSource
    shapes = state.shapes("master")
    names = {name: name for name in shapes}
    try:
        if model.path is None:
            source = TensorDict(build_model(model, seed=seed, attn_implementation="eager").state_dict())
        else:
            source = TensorFiles(Path(model.path), "model")
            # Files of a base model have names without its prefix.
            if "model.norm.weight" not in source.names():
                names = {name: name.removeprefix("model.") for name in shapes}
            check_source(source, {names[name]: shape for name, shape in shapes.items()}, "the weights")
        for part in state.local("master"):
            part.tensor.copy_(source.read(names[part.name]))
    except (CheckpointError, WeightsError) as error:
        raise ConfigError(f"the model {model.path!r} cannot be built: {error}") from error
