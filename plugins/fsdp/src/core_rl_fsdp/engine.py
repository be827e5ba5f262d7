"""The FSDP2 engine: a packed Hugging Face model, sharded over data, context and tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import RankAddress
from core_rl.errors import ConfigError
from core_rl.state.gather import LocalPart
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine
from core_rl.toolkit.meta_build import build_on_meta
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.ulysses import check_heads
from core_rl_fsdp.activation_offload import ActivationOffload
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.meshes import SHARD, TENSOR, Meshes
from core_rl_fsdp.tensor_parallel import apply_tensor_parallel, check_tensor_parallel

__all__ = ["FSDPEngine"]


class FSDPEngine(HFTrainEngine):
    """Weights, gradients and optimizer state are sharded; see `Meshes` for over which ranks."""

    config: FSDPConfig

    def _groups(self, world: Comm) -> RankGroups:
        self._meshes = Meshes.of(world, self.layout, self.config.options.replicas)
        return self._meshes.groups

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention(compiled=self.config.options.compile)
        chosen, seed = self.config.model, self.config.seed
        unloaded = build_on_meta(chosen, seed=seed, attn_implementation=PACKED_ATTENTION, experts="grouped")
        if unloaded is not None:
            model = unloaded.model
        else:
            model = build_model(chosen, seed=seed, attn_implementation=PACKED_ATTENTION, experts="grouped")
        self._check_layout(model)
        if self.config.options.gradient_checkpointing:
            _recompute_activations(model)
        self._packed = PackedModel(model, chosen.head, self._meshes.shards)
        if unloaded is None:
            self._packed.to(self.device)
        self._partial: frozenset[str] = frozenset()
        if self.layout.tp > 1:
            partial = apply_tensor_parallel(model, self._meshes.tensor, self._meshes.shards)
            self._partial = frozenset(map(self._written_name, partial))
        self._shard_modules(self._packed, self._meshes.data)
        offload = self.config.options.activation_offload
        self._activation_offload = ActivationOffload(self._gathered()) if offload else None
        if unloaded is not None:
            unloaded.materialize(self._packed, self.device)
        if self.layout.cp > 1:
            # These ranks hold different tokens, and drop different elements of them.
            torch.manual_seed(torch.initial_seed() + self._meshes.shards.context.rank)
        self._adopt(model)
        if unloaded is not None:
            self._load_named_tensors("master", unloaded.source)
            self._load_named_tensors("buffers", unloaded.source)

    def _check_layout(self, model: PreTrainedModel) -> None:
        """Refuse what the model cannot take, before anything is moved or cut."""
        if self.layout.tp > 1:
            check_tensor_parallel(model, self.layout.tp)
        if self.layout.cp > 1:
            check_heads(model.config.get_text_config().num_attention_heads // self.layout.tp, self.layout.cp)

    def _shard_modules(self, packed: PackedModel, mesh: DeviceMesh) -> None:
        reshard = self.config.options.reshard_after_forward
        compute = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for block in _blocks(packed.model):
            if self.config.options.compile:
                # Sequences of all lengths meet here, so sizes stay symbols.
                block.compile(dynamic=True)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if packed.head != "lm":
            # The scalar head computes in float32, whatever the blocks do.
            fully_shard(cast("nn.Module", packed.model.score), mesh=mesh, reshard_after_forward=False)
        self._packed_root = fully_shard(packed, mesh=mesh, mp_policy=policy)
        for module in self._sharded():
            # The core has already divided the loss by the global weight, so ranks add up. FSDP
            # would average, and gloo has no pre-multiplied sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def _gathered(self) -> Iterator[nn.Module]:
        return (module for module in self._packed.modules() if isinstance(module, FSDPModule))

    def _sharded(self) -> Iterator[FSDPModule]:
        return (module for module in self._packed.modules() if isinstance(module, FSDPModule))

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        each = self.config.options.reduce_scatter == "each"
        for number, micro_batch in enumerate(micro_batches, start=1):
            self._packed_root.set_requires_gradient_sync(each or number == len(micro_batches))
            with self._saved_activations(forward_only):
                outputs = self._packed(micro_batch, step.outputs, step.temperature, step.trained_only)
            loss = step(ModelOutput(**outputs), micro_batch)
            if not forward_only:
                loss.backward()
        if forward_only:
            # A backward pass frees the root's gathered weights; without one they would stay, and the
            # next forward pass would use them although the shards may have changed by then.
            for module in self._sharded():
                module.reshard()

    def _saved_activations(self, forward_only: bool) -> AbstractContextManager[None]:
        offload = None if forward_only else self._activation_offload
        return nullcontext() if offload is None else offload.active()

    def _reduce_grads(self) -> None:
        """Add up the parts that tensor parallel ranks have; over all others FSDP adds in each backward pass."""
        grads = [grad for name, grad in self._grads() if name in self._partial]
        if grads:
            total = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(total, group=self._meshes.shards.tensor.group)
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    # ------------------------------------------------- how a tensor is spread

    def _local(self, tensor: Tensor) -> LocalPart:
        if not isinstance(tensor, DTensor):
            return super()._local(tensor)
        bounds = [(0, size) for size in tensor.shape]
        # FSDP cuts along the first dimension what tensor parallelism has left.
        for axis in (TENSOR, SHARD):
            dim = _cut(tensor, axis)
            if dim is not None:
                bounds[dim] = _piece(bounds[dim], *self._meshes.places[axis])
        return LocalPart(tensor.to_local(), tuple(start for start, _ in bounds))

    def _copy_world(self) -> Comm:
        return self._meshes.copy


def _recompute_activations(model: PreTrainedModel) -> None:
    """Under the name that transformers 5 has for it; its first versions know the old one only."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})


def _cut(tensor: DTensor, axis: str) -> int | None:
    """The dimension along which ``tensor`` is cut over a dimension of its mesh."""
    names = tensor.device_mesh.mesh_dim_names or ()
    if axis not in names:
        return None
    placement = tensor.placements[names.index(axis)]
    return None if isinstance(placement, Replicate) else int(getattr(placement, "dim"))  # noqa: B009  strided or not


def _piece(bounds: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    """What `torch.chunk` gives: all pieces but the last ones are equally large."""
    start, stop = bounds
    size = -(-(stop - start) // count)
    return min(stop, start + size * number), min(stop, start + size * (number + 1))


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, by the class names that transformers says not to split."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(f"{type(model).__name__} names no blocks to shard (_no_split_modules is empty)")
    return blocks
