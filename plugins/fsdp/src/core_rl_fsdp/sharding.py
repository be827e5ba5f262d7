"""FSDP2 over the blocks of a packed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from core_rl.distributed.comm import Comm
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.dtensor import own_part, shard_parameter
from core_rl.toolkit.experts import dispatch_experts, expert_modules
from core_rl.toolkit.fully_sharded import add_up_gradients, fsdp_modules
from core_rl.toolkit.packed import PackedModel
from core_rl_fsdp.config import FSDPConfig

REDUCE_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard_modules(
    packed: PackedModel, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, config: FSDPConfig
) -> FSDPModule:
    """Shard each block, both ends of the model and the rest of ``packed`` in place; returns the root.

    With expert parallelism, ``expert_mesh`` has the ranks with the same experts.
    """
    reshard = config.options.reshard_after_forward
    compute = torch.bfloat16 if config.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=REDUCE_DTYPES[config.options.reduce_dtype]
    )
    # Experts and both ends get gates, ids or hidden states, of which nothing is to be rounded.
    exact = replace(policy, cast_forward_inputs=False)
    if expert_mesh is not None:
        shard_experts(packed.model, expert_mesh, exact, reshard)
    ignored = _ready(packed, config) if mesh.size() == 1 else set()
    shard = partial(fully_shard, mesh=mesh, ignored_params=ignored)

    def has_work(part: nn.Module) -> bool:
        """Whether there are weights to gather, to reduce or to cast."""
        return compute is not None or not ignored.issuperset(part.parameters())

    blocks = _blocks(packed.model)
    if config.options.compile:
        for block in blocks:
            # Sequences of all lengths meet here, so sizes stay symbols.
            block.compile(dynamic=True)
    embedding, head = _ends_apart(packed.model)
    blocks = [*filter(has_work, blocks)]
    embedding, head = (end if end is not None and has_work(end) else None for end in (embedding, head))
    for block in blocks:
        shard(block, mp_policy=policy, reshard_after_forward=reshard)
    if embedding is not None:
        shard(embedding, mp_policy=exact, reshard_after_forward=reshard)
    if head is not None:  # the backward pass begins with it
        shard(head, mp_policy=exact, reshard_after_forward=False)
    if mesh.device_type == "cuda":
        _prefetch([part for part in (embedding, *blocks, head) if part is not None])
    if packed.head != "lm":
        # The scalar head computes in float32, whatever the blocks do.
        shard(cast("nn.Module", packed.model.score), reshard_after_forward=False)
    root = shard(packed, mp_policy=exact)
    add_up_gradients(packed, mesh.size())
    return root


def _ready(packed: PackedModel, config: FSDPConfig) -> set[nn.Parameter]:
    """Parameters that have the compute dtype, and gradients of the dtype of their sum, if any: of these, one rank would
    only make copies.
    """
    compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    adds_up = compute == REDUCE_DTYPES[config.options.reduce_dtype] == torch.float32
    return {
        parameter
        for parameter in packed.model.parameters()
        if parameter.dtype == compute and (adds_up or config.optimizer is None or not parameter.requires_grad)
    }


def _ends_apart(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Embedding and language-model head, where they do not share their weight.

    They are gathered and reduced apart from the root, whose weights are there from the beginning of a pass to its end.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None, None
    if not isinstance(head, nn.Module):
        return embedding, None
    return (None, None) if head.weight is embedding.weight else (embedding, head)


def _prefetch(parts: Sequence[nn.Module]) -> None:
    """Let each part gather the next one's weights before it computes, also where Python is slower than the GPU."""
    for part, following in pairwise(parts):
        # With those of its experts, if they are sharded apart.
        cast("FSDPModule", part).set_modules_to_forward_prefetch([*fsdp_modules(following)])


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, by transformers' class names of unsplit modules."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UnsupportedCapability(
            f"{type(model).__name__} names no blocks to shard (_no_split_modules is empty)"
        )
    return blocks


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
    """Shard by experts, or by their rows where experts do not divide evenly over ranks."""
    experts, *sizes = own_part(parameter).shape
    return Shard(1) if experts % ranks and sizes and sizes[0] % ranks == 0 else Shard(0)
