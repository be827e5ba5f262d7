"""The FSDP2 backend: a packed Hugging Face model, sharded over data, context and tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext, PassMode
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.collectives import add_up
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import LayoutError
from core_rl.state.store import is_float32_head
from core_rl.toolkit.attention import PACKED_ATTENTION, check_heads, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.cuda import require_device_memory, use_flash_attention
from core_rl.toolkit.dtensor import own_part
from core_rl.toolkit.experts import check_expert_parallel
from core_rl.toolkit.fully_sharded import check_copies, fsdp_modules, reset_pass, reshard
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.hf_state import fill
from core_rl.toolkit.lora import checkpoint_name
from core_rl.toolkit.meta_build import build_on_meta, model_on_meta
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.sequence_layers import stateful_layers
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.meshes import Meshes
from core_rl_fsdp.sharding import apply_expert_parallel, shard_modules
from core_rl_fsdp.tensor_parallel import apply_tensor_parallel, check_sequence_parallel, check_tensor_parallel

SMALLEST_BYTES = 1024
"""Smaller tensors stay where they are: moving one takes longer than it saves (torchtune keeps the same bound)."""


class HostCopy:
    """A copy of a tensor in host memory, and the previous copy."""

    def __init__(self, values: Tensor, device: torch.device, previous: HostCopy | None) -> None:
        self.values = values
        self.device = device
        """Device of the tensor."""
        self.previous = previous
        self.arrival: tuple[Tensor, Any] | None = None
        """The tensor on its way back, and the event of its arrival."""


class SideCopies:
    """Copies for which the computation does not wait, where the device has streams; on the CPU, plain ones.

    A backward pass asks for copies in the opposite order, nearly. While it computes with one, the one made before it
    is on its way.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last: HostCopy | None = None

    def forget(self) -> None:
        """Let the next copy be the first one."""
        self._last = None

    def to_host(self, tensor: Tensor) -> HostCopy:
        """A copy with the strides of ``tensor``: kernels choose their order of summation by them."""
        device = tensor.device
        values = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda", requires_grad=False)
        if device.type == "cpu":
            values.copy_(tensor.detach())
        else:
            module, stream = self._beside(device)
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                values.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(stream)  # its memory is not reused before it is read
        self._last = HostCopy(values, device, self._last)
        return self._last

    def to_device(self, copy: HostCopy) -> Tensor:
        """The tensor again, on its device."""
        if copy.device.type == "cpu":
            return copy.values
        self._begin(copy)
        arrival, copy.arrival = copy.arrival, None
        assert arrival is not None  # begun just now
        tensor, arrived = arrival
        module, _ = self._beside(copy.device)
        current = module.current_stream(copy.device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        if copy.previous is not None:
            self._begin(copy.previous)
            copy.previous = None
        return tensor

    def _begin(self, copy: HostCopy) -> None:
        """Let ``copy`` go back to its device, unless it is on its way."""
        if copy.arrival is None:
            module, stream = self._beside(copy.device)
            with module.stream(stream):
                tensor = copy.values.to(copy.device, non_blocking=True)
                copy.arrival = tensor, stream.record_event()

    def _beside(self, device: torch.device) -> tuple[Any, Any]:
        """The module of torch for ``device``, and the stream of the copies."""
        module: Any = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        return module, self._streams[device]


class ActivationOffload:
    """Copies what autograd saves to host memory, pinned for CUDA, until it is needed; nothing waits for it.

    Weights stay: they are there in any case, and a sharded module gathers them again itself. With
    gradient checkpointing, only the inputs of blocks are saved and moved. The
    values, and so the gradients, are the same bit for bit. (`torch.autograd.graph.save_on_cpu` would
    copy the gathered weights as well, and nothing at all on the CPU.)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """``modules`` have their weights gathered when their forward pass begins, and are final."""
        self._weights: set[int] = set()
        self._copies = SideCopies()
        for module in modules:
            # Not compiled: a compiled block runs its hooks inside.
            module.register_forward_pre_hook(torch.compiler.disable(self._note_weights))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, saved tensors move."""
        self._weights.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copies.forget()

    def _note_weights(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters():
            self._weights.add(own_part(parameter).untyped_storage()._cdata)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._pack(getattr(tensor, name)) for name in names}
            return _PartsOnHost(type(tensor), parts, context, tensor.size(), tensor.stride())
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        return self._copies.to_host(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PartsOnHost):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            tensor: Tensor = packed.kind.__tensor_unflatten__(
                parts, packed.context, packed.size, packed.stride
            )
            return tensor
        if isinstance(packed, HostCopy):
            return self._copies.to_device(packed)
        assert isinstance(packed, Tensor)
        return packed


@dataclass(frozen=True)
class _PartsOnHost:
    """A tensor that is made of others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


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
            # The name that transformers 5 has for it; its first versions know the old one only.
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        self.packed = PackedModel(model, model_config.head, self._meshes.shards)
        if unloaded is None:
            self.packed.to(context.device)
        self._shard(model, context.config)
        self._units = [*fsdp_modules(self.packed)]
        gathered = [unit for unit in self._units if isinstance(unit, nn.Module)]
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
            for unit in self._units:
                unit.set_requires_gradient_sync(reduces_each or last, recurse=False)
                # Between copies of the weights, gradients need to be added up once.
                unit.set_requires_all_reduce(last, recurse=False)
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

    def reduce_grads(self) -> None:
        """Add up the parts that tensor parallel ranks have; over all others FSDP adds in each backward pass."""
        grads = [grad for name, grad in self.local_grads() if name in self._partial] if self._partial else []
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
