"""The engine: a backend over a module of its own, and the description of each rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from core_rl.errors import CheckpointError, ConfigError, WeightsError
from core_rl.toolkit import (
    BuildContext,
    MicroBatchStep,
    ModelConfig,
    ModelOutput,
    PassMode,
    ReplicatedState,
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
from core_rl_tiny.model import Llama


class TinyBackend(TrainBackend[TrainEngineConfig]):
    """Every rank has the whole model, and runs it on its own sequences, one at a time."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        self.group = context.groups.data_parallel
        self.config = read_config(context.config.model)
        context.check_model(self.config)
        self.model = Llama(self.config)
        self.config.architectures = ["LlamaForCausalLM"]
        _load(_views(self.model, nn.Parameter.detach), context.config.model, context.seed)
        self.model.to(context.device)
        optimizer_config = context.config.optimizer
        self.optimizer = build_adamw(self.model.parameters(), optimizer_config) if optimizer_config else None

    def hf_config(self) -> PretrainedConfig:
        return self.config

    def state(self) -> ReplicatedState:
        weights = _views(self.model, nn.Parameter.detach)
        tensors = {"params": weights, "master": weights, "grads": _views(self.model, _grad)}
        kinds: tuple[str, ...] = ()
        if self.optimizer is not None:
            moments, kinds = self.optimizer.state, moment_kinds(self.optimizer)
            tensors |= {kind: _views(self.model, partial(_moment, moments, kind)) for kind in kinds}
        # `_load` refuses files with other tensors, so that none is carried.
        return ReplicatedState(tensors=tensors, rank=self.group.rank, optimizer_kinds=kinds)

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


def _views(model: Llama, tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors as views of ``tensor_of`` each parameter."""
    return {part.name: tensor_of(part.parameter)[part.rows] for part in model.checkpoint()}


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _moment(moments: Mapping[Tensor, Mapping[str, Tensor]], kind: str, parameter: nn.Parameter) -> Tensor:
    return moments[parameter][kind]


def _load(weights: dict[str, Tensor], model: ModelConfig, seed: int) -> None:
    """Fill ``weights`` from the files of ``model.path``; without one, with what every engine draws from ``seed``."""
    source: TensorSource
    names = {name: name for name in weights}
    try:
        if model.path is None:
            source = TensorDict(build_model(model, seed=seed, attn_implementation="eager").state_dict())
        else:
            source = TensorFiles(Path(model.path), "model")
            # Files of a base model have names without its prefix.
            if "model.norm.weight" not in source.names():
                names = {name: name.removeprefix("model.") for name in weights}
            check_source(source, {names[name]: tuple(w.shape) for name, w in weights.items()}, "the weights")
        for name, weight in weights.items():
            weight.copy_(source.read(names[name]))
    except (CheckpointError, WeightsError) as error:
        raise ConfigError(f"the model {model.path!r} cannot be built: {error}") from error
