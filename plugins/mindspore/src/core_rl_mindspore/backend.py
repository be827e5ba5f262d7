"""`MindSporeBackend`: dense decoders of MindSpore behind the core's interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mindspore
from mindspore import Parameter, mint, ops
from transformers import PretrainedConfig

from core_rl.backend.parameter_rules import ParameterOptions
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import ReplicatedState, TensorSource
from core_rl.backend.train_backend import BuildContext, PassMode, TrainBackend
from core_rl.checkpoint.model_config import read_config
from core_rl.config.base import Config
from core_rl.config.engine import OptimizerConfig, TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.collectives import add_up
from core_rl.toolkit.hf_state import fill, planned_model
from core_rl.toolkit.model_files import carried_tensors, exported_config
from core_rl_mindspore.crossing import launch_in_order, loss_of_torch, to_torch
from core_rl_mindspore.heads import head_of
from core_rl_mindspore.model import Decoder, check_family

BUCKET_BYTES = 32 * 2**20
"""Gradients are added up over ranks together up to this size, in bytes."""


class MindSporeOptions(Config):
    """Settings of MindSpore's own."""

    recompute: bool = False
    """Compute the activations of each layer again in the backward pass, instead of keeping them."""


class MindSporeConfig(TrainEngineConfig):
    """The common config and MindSpore's own section."""

    options: MindSporeOptions = MindSporeOptions()

    @property
    def recomputes(self) -> bool:
        return self.options.recompute


@dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A weight with its gradient and moments, in float32, and its settings."""

    weight: Parameter
    grad: Parameter
    exp_avg: Parameter
    exp_avg_sq: Parameter
    options: ParameterOptions

    @staticmethod
    def of(name: str, weight: Parameter, options: ParameterOptions) -> TrainedWeight:
        """``weight`` with a gradient and moments of 0."""
        shape = tuple(weight.shape)
        grad, mean, square = (zeros(f"{name}/{kind}", shape) for kind in ("grad", "exp_avg", "exp_avg_sq"))
        return TrainedWeight(weight=weight, grad=grad, exp_avg=mean, exp_avg_sq=square, options=options)

    def step(self, config: OptimizerConfig, scale: float, lr: float, count: int) -> None:
        """Update number ``count``, from 1, by the gradient times ``scale`` (AdamW, arXiv:1711.05101).

        MindSpore's Adam kernel forms ``1 - beta`` in float32, which is 5e-5 off for 0.999. And `Tensor.add_` and
        `Tensor.mul_` of MindSpore 2.10 leave a tensor on the CPU as it is, without an error: only ``assign`` sets it.
        """
        rate, grad = lr * self.options.lr_factor, self.grad * scale
        first, second = config.betas
        mean = _blended(self.exp_avg, grad, first)
        root = mint.sqrt(_blended(self.exp_avg_sq, mint.square(grad), second))
        update = mean / (root / math.sqrt(1 - second**count) + config.eps)
        decayed = self.weight * (1 - rate * self.options.weight_decay)
        ops.assign(self.weight, decayed - update * (rate / (1 - first**count)))


def zeros(name: str, shape: tuple[int, ...]) -> Parameter:
    """A float32 parameter of MindSpore."""
    return Parameter(mint.zeros(shape), name=name)


def _blended(moment: Parameter, value: mindspore.Tensor, beta: float) -> mindspore.Tensor:
    """The running mean ``moment`` after one more ``value``."""
    return ops.assign(moment, moment * beta + value * (1 - beta))


class MindSporeBackend(TrainBackend[MindSporeConfig]):
    """Every rank has the whole model in MindSpore, and runs it on its own sequences."""

    def check_model(self, config: MindSporeConfig) -> None:
        check_family(read_config(config.model))

    def build(self, context: BuildContext[MindSporeConfig]) -> None:
        launch_in_order()
        self.context, config = context, context.config
        planned, source = planned_model(config.model, context.seed)
        context.check_model(planned.config)
        parameters = dict(planned.named_parameters())
        weights = {name: zeros(name, tuple(parameter.shape)) for name, parameter in parameters.items()}
        self.decoder = Decoder(planned.config, weights, recompute=config.options.recompute)
        self.head = head_of(config.model.head, weights)
        rules = context.parameter_rules
        self.trained = {
            name: TrainedWeight.of(name, weights[name], rules.of(name, tuple(parameter.shape)))
            for name, parameter in parameters.items()
            if rules is not None and parameter.requires_grad
        }
        carried = carried_tensors(planned, config.model, parameters.keys())
        self._hf_config = exported_config(planned, config.model, carried)
        self._state = _state(weights, self.trained, context.groups.data_parallel.rank, carried)
        fill(self._state, "master", source)

    def hf_config(self) -> PretrainedConfig:
        return self._hf_config

    def state(self) -> ReplicatedState:
        return self._state

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            if mode == "forward" or not self.trained:
                self.loss(micro_batch, step)
            else:
                self.add_gradients(micro_batch, step)

    def add_gradients(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> None:
        """Forward and backward pass of one micro-batch."""
        weights = [trained.weight for trained in self.trained.values()]
        grads = mindspore.grad(lambda: self.loss(micro_batch, step), None, weights)()
        for trained, grad in zip(self.trained.values(), grads, strict=True):
            ops.assign_add(trained.grad, grad)

    def loss(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> mindspore.Tensor:
        """The scalar that ``step`` returns for one micro-batch, in MindSpore's graph."""
        values = self.head.values(self.decoder(micro_batch), micro_batch, step)
        return loss_of_torch(
            lambda leaves: step(self.head.output(leaves, micro_batch, step), micro_batch), values
        )

    def set_training(self, training: bool) -> None:
        """No layer depends on it: the core trains no model with dropout on this engine."""

    def zero_grad(self) -> None:
        for grad in self._state.tensors["grads"].values():
            grad.zero_()

    def reduce_grads(self) -> None:
        group = self.context.groups.data_parallel
        if group.size > 1:
            add_up([*self._state.tensors["grads"].values()], group, BUCKET_BYTES)

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.context.config.optimizer is not None  # the core steps only with one
        for trained in self.trained.values():
            trained.step(self.context.config.optimizer, scale, lr, count)

    def after_load(self, kinds: frozenset[str]) -> None:
        """The model computes with the master weights themselves."""


def _state(
    weights: Mapping[str, Parameter],
    trained: Mapping[str, TrainedWeight],
    rank: int,
    carried: TensorSource | None,
) -> ReplicatedState:
    """Views of all tensors in torch."""
    master = {name: to_torch(weight) for name, weight in weights.items()}
    return ReplicatedState(
        tensors={
            "params": master,
            "master": master,
            "grads": {name: to_torch(one.grad) for name, one in trained.items()},
            "exp_avg": {name: to_torch(one.exp_avg) for name, one in trained.items()},
            "exp_avg_sq": {name: to_torch(one.exp_avg_sq) for name, one in trained.items()},
        },
        rank=rank,
        optimizer_kinds=("exp_avg", "exp_avg_sq") if trained else (),
        carried=carried,
    )
