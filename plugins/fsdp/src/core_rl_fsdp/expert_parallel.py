"""Expert parallelism: the fused weights of experts, spread over ranks next to each other.

FSDP shards each rank's experts over the ranks that have the same ones, and all other weights over all ranks: the
meshes that torchtitan calls ``efsdp`` and ``fsdp``.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from core_rl.distributed.comm import Comm
from core_rl.toolkit.dtensor import own_part, shard_parameter
from core_rl.toolkit.experts import dispatch_experts, expert_modules

__all__ = ["apply_expert_parallel", "shard_experts"]


def apply_expert_parallel(model: PreTrainedModel, mesh: DeviceMesh, ranks: Comm) -> None:
    """Spread the experts of ``model`` in place over ``mesh``, whose group is that of ``ranks``."""
    for module in expert_modules(model).values():
        for name, _ in [*module.named_parameters(recurse=False)]:
            shard_parameter(module, name, mesh, 0)
    dispatch_experts(model, model.base_model, ranks)


def shard_experts(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Shard this rank's experts of each layer over ``mesh``, the ranks with the same ones."""
    for module in expert_modules(model).values():
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=partial(_placement, mesh.size(-1)),
        )


def _placement(ranks: int, parameter: nn.Parameter) -> Shard:
    """By whole experts, or where these do not divide by their rows, so that every rank holds as much."""
    experts, *sizes = own_part(parameter).shape
    return Shard(1) if experts % ranks and sizes and sizes[0] % ranks == 0 else Shard(0)
