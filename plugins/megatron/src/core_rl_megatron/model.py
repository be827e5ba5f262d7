"""This rank's part of the model: its chunks (`StageModel`), and the buckets of gradients and weights around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.protocols import LowRank
from core_rl.backend.train_backend import BuildContext
from core_rl.distributed.agreement import on_all
from core_rl.errors import ConfigError
from core_rl.toolkit.vision import has_tower
from core_rl_megatron.adapters import add_adapters
from core_rl_megatron.config import MegatronConfig, MegatronOptions
from core_rl_megatron.experts import mark_experts
from core_rl_megatron.modules import PackedGPT, build_chunk
from core_rl_megatron.naming import RowBox, boxes_of, name_in_model
from core_rl_megatron.options import groups_experts
from core_rl_megatron.sharded_state import CheckpointTensors
from core_rl_megatron.translation import transformer_config
from core_rl_megatron.versions import forget_reduction


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
    tensors: CheckpointTensors,
    products: Mapping[str, LowRank],
) -> StageModel:
    """This rank's layers of ``model``, of which the trained ``tensors`` have gradients. Collective.

    ``products`` belong to its adapter, by the checkpoint name of the weight.

    Raises on all ranks what `transformer_config` raises, and `ConfigError` where a part of a fused parameter is frozen.
    """
    config, virtual = transformer_config(context.config, model.config), context.config.options.virtual_stages
    grouped = groups_experts(context.config, model.config.get_text_config())
    chunks = [
        build_chunk(config, model, context.config.model.head, stage, grouped=grouped).to(context.device)
        for stage in (range(virtual) if virtual > 1 else (None,))
    ]
    ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    vision = has_tower(model.config)
    boxes = {
        parameter: tuple(replace(box, name=name_in_model(box.name, vision=vision)) for box in row_boxes)
        for chunk in chunks
        for parameter, row_boxes in boxes_of(chunk, *ranks)
    }
    if context.config.model.lora is not None:
        for chunk in chunks:
            boxes |= add_adapters(chunk, boxes, products, context.config.model.lora)
    # Under the names that files have; experts have theirs already.
    boxes = {
        parameter: tuple(replace(box, name=tensors.layout.names(box.name)[0]) for box in row_boxes)
        for parameter, row_boxes in boxes.items()
    }
    spread = max(context.layout.ep, context.layout.tp) > 1
    for chunk in chunks:
        mark_experts(chunk.named_parameters(), spread=spread)
    on_all(context.world, lambda: _freeze(boxes, tensors.trained), "model.frozen")
    for parameter, row_boxes in boxes.items():
        nn.init.zeros_(parameter)  # rows that pad the vocabulary are never loaded
        if context.config.dtype == "bfloat16" and row_boxes[0].name != "score.weight":
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
    for parameter, row_boxes in boxes.items():
        names = list(dict.fromkeys(box.name for box in row_boxes))
        trained_names = [name for name in names if name in trained]
        if trained_names and len(trained_names) < len(names):
            frozen = [name for name in names if name not in trained]
            raise ConfigError(
                f"model.frozen matches {frozen}, which Megatron has in one parameter with {trained_names}; "
                "freeze all of these or none"
            )
        parameter.requires_grad_(bool(trained_names))


class Buckets:
    """The buckets of ``chunks`` in Megatron's DistributedDataParallel."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks: list[Any] = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        self._groups: list[Any] = [
            group
            for chunk in self._chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]
        for group in self._groups:
            # Megatron counts in its first step how often each gradient comes, which a pass that fails would spoil.
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            group.is_first_batch = False
        # The head is no module that is called: its weights are read after the layers.
        self._hooks = [
            chunk.module.register_forward_hook(lambda *_: self.gather())
            for chunk in self._chunks
            if chunk.use_forward_hook
        ]

    @contextmanager
    def reducing(self, *, last: bool) -> Iterator[None]:
        """A pass. In the last micro-batch of the ``last`` pass of a step, gradients are added up over ranks."""
        functions = [chunk.no_sync for chunk in self._chunks]
        with ExitStack() as stack:
            if not last:
                for function in functions:
                    stack.enter_context(function())
            elif functions:
                # For all but the last micro-batch. Schedules take a list where a rank has several chunks.
                config = self._chunks[0].config
                config.no_sync_func = functions if len(functions) > 1 else functions[0]
                stack.callback(setattr, config, "no_sync_func", None)
            yield

    def reduce(self) -> None:
        """Start missing reductions; `finalize_model_grads` waits for all. Collective."""
        for group in self._groups:
            if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def forget_weights(self) -> None:
        """Mark weights as changed on their owners; they are gathered when they are needed."""
        for group in self._groups:
            group.param_gather_dispatched = False

    def gather(self) -> None:
        """Weights that are not here yet. Collective."""
        for group in self._groups:
            gathered = group.param_gather_dispatched and group.param_gather_handle is None
            if group.ddp_config.overlap_param_gather and not gathered:
                group.start_param_sync(force_sync=True)

    def wait(self) -> None:
        """Until gradients that are being added up are no longer written."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()

    def forget_gradients(self) -> None:
        """Drop gradients of earlier passes, and wait for their reductions."""
        self.wait()
        for group in self._groups:
            forget_reduction(group)

    def abandon(self) -> None:
        """Forget collectives of a failed pass. A lone rank waits for them; peers may never reach them."""
        for group in self._groups:
            spread = group.ddp_config.use_distributed_optimizer
            ranks = group.intra_distributed_optimizer_instance_group if spread else group.data_parallel_group
            for handle in (group.grad_reduce_handle, group.param_gather_handle):
                if handle is not None and ranks.size() == 1:
                    handle.wait()
            forget_reduction(group)
            group.param_gather_handle = None
            group.per_param_grad_ready_counts = {}
        self.forget_weights()

    def close(self) -> None:
        """Drop the hooks, which hold the chunks."""
        for hook in self._hooks:
            hook.remove()
        for chunk in self._chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=False)
