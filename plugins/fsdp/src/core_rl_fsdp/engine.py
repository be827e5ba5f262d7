"""The FSDP2 engine: a packed Hugging Face model, sharded over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from core_rl.data.batch import SequenceBatch
from core_rl.engines.collectives import World
from core_rl.engines.meta import FinetuneSpec, RankAddress
from core_rl.engines.outputs import ModelOutput
from core_rl.engines.steps import MicroBatchStep
from core_rl.errors import ConfigError
from core_rl.models.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.models.build import build_model
from core_rl.models.gather import LocalPart
from core_rl.models.hf_engine import HFTrainEngine
from core_rl.models.packed import PackedModel
from core_rl_fsdp.config import FSDPConfig

__all__ = ["FSDPEngine"]


class FSDPEngine(HFTrainEngine):
    """Weights, gradients and optimizer state are sharded over all ranks; each rank sees other sequences."""

    config: FSDPConfig

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention()
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=PACKED_ATTENTION)
        if self.config.options.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._packed = PackedModel(model, self.config.model.head).to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world.size,), mesh_dim_names=("dp",))
        self._shard_modules(self._packed, mesh)
        self._adopt(model)

    def _shard_modules(self, packed: PackedModel, mesh: DeviceMesh) -> None:
        reshard = self.config.options.reshard_after_forward
        compute = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for block in _blocks(packed.model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if packed.head != "lm":
            # The scalar head computes in float32, whatever the blocks do.
            fully_shard(cast("nn.Module", packed.model.score), mesh=mesh, reshard_after_forward=False)
        fully_shard(packed, mesh=mesh, mp_policy=policy)
        for module in packed.modules():
            if isinstance(module, FSDPModule):
                # The core has already divided the loss by the global weight, so ranks add up. FSDP
                # would average, and gloo has no pre-multiplied sum.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            outputs = self._packed(micro_batch, step.outputs, step.temperature, step.trained_only)
            loss = step(ModelOutput(**outputs), micro_batch)
            if not forward_only:
                loss.backward()
        if forward_only:
            # A backward pass frees the root's gathered weights; without one they would stay, and the
            # next forward pass would use them although the shards may have changed by then.
            for module in self._packed.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _reduce_grads(self) -> None:
        """FSDP adds up over ranks in each backward pass."""

    # ------------------------------------------------- how a tensor is spread

    def _local(self, tensor: Tensor) -> LocalPart:
        if not isinstance(tensor, DTensor):
            return super()._local(tensor)
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return LocalPart(tensor.to_local(), tuple(offsets))

    def _copy_world(self) -> World:
        return self.world


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, by the class names that transformers says not to split."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(f"{type(model).__name__} names no blocks to shard (_no_split_modules is empty)")
    return blocks
