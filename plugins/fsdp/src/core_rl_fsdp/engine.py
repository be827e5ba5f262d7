"""The FSDP2 backend: a packed Hugging Face model, sharded over data, context and tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext, PassMode
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import LayoutError
from core_rl.state.store import is_float32_head
from core_rl.toolkit.attention import PACKED_ATTENTION, check_heads, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.cuda import require_device_memory, use_flash_attention
from core_rl.toolkit.experts import check_expert_parallel
from core_rl.toolkit.fully_sharded import reset_pass, reshard
from core_rl.toolkit.hf_backend import HFBackend, add_up
from core_rl.toolkit.hf_state import fill
from core_rl.toolkit.lora import checkpoint_name
from core_rl.toolkit.meta_build import build_on_meta, model_on_meta
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.sequence_layers import stateful_layers
from core_rl_fsdp.activation_offload import ActivationOffload
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.meshes import Meshes, check_copies
from core_rl_fsdp.sharding import apply_expert_parallel, shard_modules
from core_rl_fsdp.tensor_parallel import apply_tensor_parallel, check_sequence_parallel, check_tensor_parallel


class FSDPBackend(HFBackend[FSDPConfig]):
    """Weights, gradients and optimizer state are sharded; see `Meshes` for over which ranks."""

    packed: PackedModel
    """The model with its heads; FSDP's root module."""
    activation_offload: ActivationOffload | None
    _joined: Meshes | None = None

    @property
    def _meshes(self) -> Meshes:
        assert self._joined is not None  # `groups` comes first
        return self._joined

    def groups(self, world: Comm, config: FSDPConfig) -> RankGroups:
        self._joined = Meshes.join(world, config.layout, config.options.replicas)
        return self._joined.groups

    def teardown(self) -> None:
        if self._joined is not None:
            self._joined.leave()

    def check_model(self, config: FSDPConfig) -> None:
        check_copies(config.layout, config.options.replicas)
        if config.layout.world_size > config.layout.dp or config.layout.ep > 1:
            _check_layout(model_on_meta(config.model), config.layout)

    def build(self, context: BuildContext[FSDPConfig]) -> None:
        options, model_config = context.config.options, context.config.model
        register_packed_attention(compiled=options.compile)
        use_flash_attention(options.flash_attention)
        unloaded = build_on_meta(
            model_config, seed=context.seed, attn_implementation=PACKED_ATTENTION, experts="grouped"
        )
        if unloaded is not None:
            model = unloaded.model
        else:
            model = build_model(
                model_config, seed=context.seed, attn_implementation=PACKED_ATTENTION, experts="grouped"
            )
        _check_layout(model, context.layout)
        require_device_memory(context, model)
        if context.config.holds_compute_dtype:
            _hold(model, torch.bfloat16)
        elif context.config.dtype == "bfloat16" and unloaded is not None:
            unloaded.hold_frozen_as_in_files()
        if options.gradient_checkpointing:
            _recompute_activations(model)
        self.packed = PackedModel(model, model_config.head, self._meshes.shards)
        if unloaded is None:
            self.packed.to(context.device)
        self._shard(model, context.config)
        gathered = [module for module in self.packed.modules() if isinstance(module, FSDPModule)]
        self.activation_offload = ActivationOffload(gathered) if options.activation_offload else None
        if unloaded is not None:
            unloaded.materialize(self.packed, context.device)
        if context.layout.cp > 1:
            # These ranks hold different tokens, and drop different elements of them.
            torch.manual_seed(torch.initial_seed() + self._meshes.shards.context.rank)
        self.adopt(model, context)
        if unloaded is not None:
            fill(self.state(), "master", unloaded.source)
            fill(self.state(), "buffers", unloaded.source)

    def _shard(self, model: PreTrainedModel, config: FSDPConfig) -> None:
        """Cut the weights over tensor or expert parallel ranks, and then over all others."""
        self._partial: frozenset[str] = frozenset()
        if config.layout.tp > 1:
            partial = apply_tensor_parallel(model, self._meshes.tensor, self._meshes.shards)
            self._partial = frozenset(map(checkpoint_name, partial))
        if config.layout.ep > 1:
            apply_expert_parallel(model, self._meshes.expert, self._meshes.expert_ranks)
        self._root = shard_modules(self.packed, self._meshes.data, self._meshes.expert_data, config)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        reduces_each = self.context.config.options.reduce_scatter == "each"
        offload = None if mode == "forward" else self.activation_offload
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            self._root.set_requires_gradient_sync(reduces_each or last)
            # Between copies of the weights, gradients need to be added up once.
            self._root.set_requires_all_reduce(last)
            with nullcontext() if offload is None else offload.active():
                output = self.outputs(micro_batch, step)
            loss = step(output, micro_batch)
            if mode != "forward":
                loss.backward()
        if mode == "forward":
            reshard(self.packed)

    def verify(self) -> None:
        super().verify()
        reshard(self.packed)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        outputs = self.packed(
            micro_batch, step.outputs, step.temperature, step.trained_only, step.share_prefixes
        )
        return ModelOutput(**outputs)

    def reduce_grads(self) -> None:
        """Add up the parts that tensor parallel ranks have; over all others FSDP adds in each backward pass."""
        grads = [grad for name, grad in self.local_grads() if name in self._partial]
        if grads:
            add_up(grads, self._meshes.shards.tensor)

    def abort(self) -> None:
        reset_pass(self._root)


def _check_layout(model: PreTrainedModel, layout: ParallelLayout) -> None:
    """Refuse layouts that the model does not support, before anything is moved or cut."""
    if layout.tp > 1:
        check_tensor_parallel(model, layout.tp)
    if layout.ep > 1:
        check_expert_parallel(model, layout.ep)
    if layout.sequence_parallel:
        check_sequence_parallel(model)
    stateful = sorted({type(layer).__name__ for layer in stateful_layers(model.base_model).values()})
    if layout.sequence_parallel and stateful:
        raise LayoutError(
            f"sequence_parallel spreads the tokens of {', '.join(stateful)} of the model type "
            f"{model.config.model_type!r}, whose state needs all of them; leave it off"
        )
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if layout.cp > 1 and heads is not None:  # without attention, layers gather their tokens
        check_heads(heads // layout.tp, layout.cp)


def _hold(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep all weights in ``dtype`` but the scalar head's, which computes in float32."""
    for name, parameter in model.named_parameters():
        if not is_float32_head(checkpoint_name(name)):
            parameter.data = parameter.data.to(dtype)


def _recompute_activations(model: PreTrainedModel) -> None:
    """Under the name that transformers 5 has for it; its first versions know the old one only."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
