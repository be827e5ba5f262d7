"""`StageModel`: this rank's part of the model, one chunk for each virtual stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.protocols import LowRank
from core_rl.backend.train_backend import BuildContext
from core_rl.distributed.agreement import on_all
from core_rl.errors import ConfigError
from core_rl_megatron.adapters import add_adapters
from core_rl_megatron.choices import groups_experts
from core_rl_megatron.config import MegatronConfig, MegatronOptions
from core_rl_megatron.experts import mark_experts
from core_rl_megatron.modules import PackedGPT, build_chunk
from core_rl_megatron.naming import RowBox, boxes_of
from core_rl_megatron.translation import transformer_config

__all__ = ["StageModel", "build_stage", "wrap_chunks"]


@dataclass(frozen=True)
class StageModel:
    """Chunks with weights of 0, frozen or not, in their dtype and on their device."""

    hf_config: PretrainedConfig
    chunks: list[PackedGPT]
    boxes: dict[nn.Parameter, tuple[RowBox, ...]]
    """Boxes of checkpoint tensors in each parameter."""


def build_stage(
    context: BuildContext[MegatronConfig],
    model: PreTrainedModel,
    trained: frozenset[str],
    products: Mapping[str, LowRank],
) -> StageModel:
    """This rank's layers of ``model``, of which the checkpoint tensors ``trained`` have gradients. Collective.

    ``products`` are those of its adapter, by the checkpoint name of the weight.

    Raises on all ranks what `transformer_config` raises, and `ConfigError` where a part of a fused parameter is frozen.
    """
    config, virtual = transformer_config(context.config, model.config), context.config.options.virtual_stages
    grouped = groups_experts(context.config, model.config)
    chunks = [
        build_chunk(config, model, context.config.model.head, stage, grouped=grouped).to(context.device)
        for stage in (range(virtual) if virtual > 1 else (None,))
    ]
    ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    boxes = {parameter: found for chunk in chunks for parameter, found in boxes_of(chunk, *ranks)}
    if context.config.model.lora is not None:
        for chunk in chunks:
            boxes |= add_adapters(chunk, boxes, products, context.config.model.lora)
    spread = max(context.layout.ep, context.layout.tp) > 1
    for chunk in chunks:
        mark_experts(chunk.named_parameters(), spread=spread)
    on_all(context.world, lambda: _freeze(boxes, trained), "model.frozen")
    for parameter, found in boxes.items():
        nn.init.zeros_(parameter)  # rows that pad the vocabulary are never loaded
        if context.config.dtype == "bfloat16" and found[0].name != "score.weight":
            parameter.data = parameter.data.bfloat16()
    return StageModel(model.config, chunks, boxes)


def wrap_chunks(model: StageModel, options: MegatronOptions) -> list[Any]:
    """Megatron's DistributedDataParallel around each chunk, with float32 gradients. Collective."""
    plan = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        bucket_size=options.ddp_bucket_size,
    )
    return [
        DistributedDataParallel(chunk.config, plan, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]


def _freeze(boxes: dict[nn.Parameter, tuple[RowBox, ...]], trained: frozenset[str]) -> None:
    """Turn gradients off where no checkpoint tensor in a parameter is trained."""
    for parameter, found in boxes.items():
        names = list(dict.fromkeys(box.name for box in found))
        chosen = [name for name in names if name in trained]
        if chosen and len(chosen) < len(names):
            frozen = [name for name in names if name not in trained]
            raise ConfigError(
                f"model.frozen matches {frozen}, which Megatron has in one parameter with {chosen}; "
                "freeze all of these or none"
            )
        parameter.requires_grad_(bool(chosen))
