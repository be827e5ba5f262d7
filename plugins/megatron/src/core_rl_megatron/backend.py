"""`MegatronBackend`: a train backend over Megatron-Core's GPT model, schedules and optimizer."""

from __future__ import annotations

import core_rl_megatron.cpu_shim  # noqa: F401

# isort: split

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.parameter_rules import ParameterOptions
from core_rl.backend.protocols import LowRank, MemoryPart, SupportsRngState
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import TensorSource
from core_rl.backend.train_backend import BuildContext, PassMode, TrainBackend
from core_rl.checkpoint.model_config import read_config
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.agreement import on_all
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.build import buildable_config
from core_rl.toolkit.cuda import require_device_memory
from core_rl.toolkit.hf_state import fill, planned_model
from core_rl.toolkit.lora import adapter_config, low_rank_products
from core_rl.toolkit.model_files import exported_config
from core_rl.toolkit.taps import tapped
from core_rl.toolkit.vision import has_tower
from core_rl_megatron import cpu_shim, parallel_state, versions
from core_rl_megatron.adapters import enable_adapters
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.model import Buckets, StageModel, build_stage, wrap_chunks
from core_rl_megatron.optimizer import ShardedOptimizer
from core_rl_megatron.options import check_options, check_settings
from core_rl_megatron.parallel_state import MegatronRngState
from core_rl_megatron.schedule import Schedule
from core_rl_megatron.sharded_state import CheckpointTensors, MegatronState
from core_rl_megatron.translation import check_adapted, check_model_layout, is_hybrid


class MegatronBackend(TrainBackend[MegatronConfig], SupportsRngState):
    """One rank of a model in Megatron's layouts."""

    model: StageModel
    optimizer: ShardedOptimizer | None
    rng: MegatronRngState
    schedule: Schedule
    wrapped: Sequence[nn.Module] = ()
    """The chunks, each in Megatron's DistributedDataParallel where it is trained."""
    buckets: Buckets = Buckets(())
    _in_groups: bool = False

    # ---------------------------------------------------------------- building

    def check_model(self, config: MegatronConfig) -> None:
        model = buildable_config(config.model)
        check_model_layout(config, model)
        check_settings(config, model.get_text_config())

    def groups(self, world: Comm, config: MegatronConfig) -> RankGroups:
        check_options(config, read_config(config.model).get_text_config())
        cpu_shim.install(world.device)
        versions.hide_deprecations()
        parallel_state.join_groups(world, config.layout, config.options.virtual_stages)
        self._in_groups = True
        return parallel_state.rank_groups(world, config.layout)

    def build(self, context: BuildContext[MegatronConfig]) -> None:
        config = context.config
        if config.options.virtual_stages > 1:
            self.micro_batch_multiple = config.layout.pp
        model, tensors, weights = _planned(context)
        self._exported_config = exported_config(model, config.model, tensors.carried)
        self._adapt(context, model)
        self.rng, self.optimizer = MegatronRngState(context.seed, context.groups.data_parallel.rank), None
        with cpu_shim.building(), self.rng.own():
            self.model = build_stage(context, model, tensors, self._products)
            self.wrapped = self.model.chunks
            if config.optimizer is not None:
                half, spread = config.dtype == "bfloat16", config.options.distributed_optimizer
                self.wrapped = wrap_chunks(self.model, config.options)
                options = on_all(
                    context.world, lambda: self._parameter_options(context, tensors), "optimizer.rules"
                )
                self.optimizer = ShardedOptimizer(
                    self.wrapped, config.optimizer, options, half=half, distributed=spread
                )
        self.buckets = Buckets(self.wrapped)
        self._state = MegatronState(
            tensors, self.model.boxes, self.optimizer, context.world, copies=not config.holds_compute_dtype
        )
        self.schedule = Schedule(context, self.model, self.wrapped)
        on_all(
            context.world,
            lambda: fill(self._state, "master", weights),
            "cannot read the weights",
            ConfigError,
        )
        self.after_load(frozenset({"master"}))

    def check_sharing(self) -> None:
        model = self.model.hf_config
        reasons = {
            "layers that carry state from token to token": is_hybrid(model),
            "images, which equal placeholders stand for": has_tower(model),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise UnsupportedCapability(
                f"share_prefixes: the model type {model.model_type!r} has {reason}; set share_prefixes to false"
            )

    def teardown(self) -> None:
        """Leave Megatron's groups, which are global: the next engine of this process makes its own."""
        self.buckets.close()
        for chunk in self.wrapped:
            if isinstance(chunk, DistributedDataParallel):
                # Their hooks hold the wrapper, with its memory and groups: a cycle that may be collected much later.
                chunk.grad_accs.clear()
            for layer in chunk.modules():
                if isinstance(layer, MoELayer):
                    # It keeps gates with their graph, which leads to these hooks: the collector can't see that cycle.
                    layer.token_dispatcher = None
        if self._in_groups:
            self._in_groups = False
            parallel_state.leave_groups()

    def _adapt(self, context: BuildContext[MegatronConfig], model: PreTrainedModel) -> None:
        """Record the adapter of the Hugging Face ``model``, which is dropped after the build."""
        model_config = context.config.model
        self._products = low_rank_products(model)
        check_adapted(self._products, model.config)
        if model_config.lora is not None:
            self._adapter_config = adapter_config(
                model, model_config.lora, model_config.head, model_config.path
            )

    def _parameter_options(
        self, context: BuildContext[MegatronConfig], tensors: CheckpointTensors
    ) -> dict[nn.Parameter, ParameterOptions]:
        """The optimizer's settings for each trained parameter of this rank."""
        rules = context.parameter_rules
        assert rules is not None  # there is an optimizer
        names = {
            parameter: name for chunk in self.model.chunks for name, parameter in chunk.named_parameters()
        }
        return {
            parameter: rules.common(names[parameter], {box.name: tensors.shapes[box.name] for box in boxes})
            for parameter, boxes in self.model.boxes.items()
            if parameter.requires_grad
        }

    # ------------------------------------------------------------------- state

    def hf_config(self) -> PretrainedConfig:
        return self._exported_config

    def state(self) -> MegatronState:
        return self._state

    @torch.no_grad()
    def after_load(self, kinds: frozenset[str]) -> None:
        """Copy float32 weights to the parameters that compute."""
        if not kinds & {"master", "adapter"}:
            return
        for parameter, values in self._state.frozen.items():
            parameter.copy_(values)
        if self.optimizer is not None:
            self.optimizer.refresh()

    def memory(self, part: MemoryPart) -> Iterable[Tensor]:
        """This rank's weights with their float32 copies, buffers of gradients, or moments."""
        if part == "weights":
            yield from (parameter.detach() for parameter in self.model.boxes)
            yield from self._state.frozen.values()
        if self.optimizer is not None:
            yield from self.optimizer.memory(part)

    def rng_state(self) -> Mapping[str, Tensor]:
        return self.rng.states

    def load_rng_state(self, states: Mapping[str, Tensor]) -> None:
        self.rng.load(states)

    # ----------------------------------------------------------------- adapter

    def low_rank(self) -> Mapping[str, LowRank]:
        layout = self._state.layout
        return {layout.names(name)[0]: product for name, product in self._products.items()}

    def adapter_config(self) -> dict[str, Any]:
        return self._adapter_config

    def set_adapter(self, enabled: bool) -> None:
        for chunk in self.model.chunks:
            enable_adapters(chunk, enabled)

    # ---------------------------------------------------------------- training

    def set_training(self, training: bool) -> None:
        for chunk in self.model.chunks:
            chunk.train(training)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        with self.rng.own(), self.buckets.reducing(last=mode == "last"):
            self.schedule.run(micro_batches, step, forward_only=mode == "forward")

    def tap(
        self, micro_batches: Sequence[SequenceBatch]
    ) -> AbstractContextManager[Mapping[int, Sequence[Tensor]]]:
        layers = {layer.layer_number: layer for chunk in self.model.chunks for layer in chunk.decoder.layers}
        return tapped(layers, micro_batches, self.schedule.shards)

    def synchronize(self) -> None:
        """Gather the weights that a step changed, and wait for gradients that are being added up."""
        self.buckets.wait()
        self.buckets.gather()

    def abort(self) -> None:
        """Keep gradients: earlier passes are complete, and the core drops the rest."""
        self.schedule.abort()
        self.buckets.abandon()

    def zero_grad(self) -> None:
        self.buckets.forget_gradients()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def reduce_grads(self) -> None:
        """Sum over data and context parallel ranks, both copies of a tied embedding, and norms under sequence
        parallelism.
        """
        self.buckets.reduce()
        finalize_model_grads(list(self.wrapped), None)

    def step(self, scale: float, lr: float, count: int) -> None:
        if self.optimizer is not None:
            self.optimizer.step(scale, lr, count)
            self.buckets.forget_weights()


def _planned(
    context: BuildContext[MegatronConfig],
) -> tuple[PreTrainedModel, CheckpointTensors, TensorSource]:
    """The Hugging Face model, without memory if its files allow it; its checkpoint tensors, and their values."""
    config = context.config.model
    coefficient = config.router_aux_coef
    if coefficient and (context.config.layout.pp > 1 or context.config.options.recompute == "full"):
        raise UnsupportedCapability(
            f"model.router_aux_coef = {coefficient}: the engine 'megatron' has {Capability.AUX_LOSS.value!r} only "
            "where the routers' logits, with their gradients, are on the rank of the loss; set it to 0, or layout.pp "
            "to 1 and options.recompute to 'none' or 'selective'"
        )
    model, weights = planned_model(config, context.seed)
    context.check_model(model.config)
    require_device_memory(context, model)
    return model, CheckpointTensors.of(model, config), weights
