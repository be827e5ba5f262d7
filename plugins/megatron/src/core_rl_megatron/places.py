"""The ranks of a Megatron engine: Megatron's groups, and what the core has to know of them.

Megatron counts ranks in the order tp, cp, dp, pp: tensor parallel ranks are neighbours, and the ranks
of one pipeline stage stand together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker

from core_rl.config.layout import ParallelLayout
from core_rl.engines.collectives import RankGroups, World
from core_rl.errors import EngineStateError, LayoutError
from core_rl.models.shards import ModelShards

__all__ = ["Places", "leave_groups", "make_groups", "seed_dropout"]


@dataclass(frozen=True)
class Places:
    """Where a rank stands."""

    groups: RankGroups
    shards: ModelShards
    """How one copy of the model and its tokens are spread, but for stages."""
    copy: World
    """Ranks that hold one copy of all tensors between them."""


def make_groups(world: World, layout: ParallelLayout, virtual_stages: int, timeout_s: float) -> Places:
    """Make Megatron's process groups, and those that the core needs beside them. Collective.

    Raises `LayoutError` for virtual stages without a pipeline, and `EngineStateError` where the process has such
    groups already.
    """
    if virtual_stages > 1 and layout.pp == 1:
        raise LayoutError(
            f"options.virtual_stages={virtual_stages} needs a pipeline, and pp=1 is none; raise pp or set it to 1"
        )
    if layout.ep > 1 and (layout.dp * layout.cp * layout.tp) % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} must divide dp*cp*tp={layout.dp * layout.cp * layout.tp}, the ranks of one stage"
        )
    if mpu.model_parallel_is_initialized():
        raise EngineStateError(
            "this process has Megatron groups already, and Megatron-Core keeps one set of them; destroy() the other "
            "engine first, or give this one processes of its own (EngineGroup)"
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    own = _model_parallel_ranks(layout, world.rank)
    model_parallel = _world(world, own, _subgroup(world, layout))
    groups = RankGroups(
        data_parallel=_of(world, layout.dp, mpu.get_data_parallel_group),
        model_parallel=model_parallel,
        # The first rank of the last stage.
        output_source=len(own) // layout.pp * (layout.pp - 1),
    )
    shards = ModelShards(
        context=_of(world, layout.cp, mpu.get_context_parallel_group),
        tensor=_of(world, layout.tp, mpu.get_tensor_model_parallel_group),
        sequence_parallel=layout.sequence_parallel,
    )
    # Experts lie on ranks that otherwise hold copies, so with ep a copy may need all ranks.
    copy = world if layout.ep > 1 else _of(world, layout.tp * layout.pp, mpu.get_model_parallel_group)
    return Places(groups, shards, copy)


def leave_groups() -> None:
    """Forget Megatron's groups, so that the next engine of this process makes its own."""
    mpu.destroy_model_parallel()


def seed_dropout(seed: int) -> None:
    """Give Megatron's tracker its random states: tensor parallel ranks drop different elements, others the same."""
    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    # Offsets as in Megatron's model_parallel_cuda_manual_seed, which would also seed the global generator.
    own = seed + 2718 + mpu.get_tensor_model_parallel_rank()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", own)
    tracker.add("expert-parallel-rng", own + 1024 + 100 * mpu.get_expert_model_parallel_rank())


def _model_parallel_ranks(layout: ParallelLayout, rank: int) -> list[int]:
    """The ranks that see the same sequences as ``rank``, in rising order."""
    near = layout.tp * layout.cp
    data = rank // near % layout.dp
    return [near * (data + layout.dp * stage) + i for stage in range(layout.pp) for i in range(near)]


def _subgroup(world: World, layout: ParallelLayout) -> Any:
    size = layout.tp * layout.cp * layout.pp
    if size == 1 or size == world.size:
        return world.group
    near = layout.tp * layout.cp
    lists = [_model_parallel_ranks(layout, near * data) for data in range(layout.dp)]
    group, _ = dist.new_subgroups_by_enumeration(lists)
    return group


def _world(world: World, ranks: Sequence[int], group: Any) -> World:
    return World(group if len(ranks) > 1 else None, world.device)


def _of(world: World, size: int, group: Any) -> World:
    """Megatron's group as a `World`; a lone rank needs none."""
    return World(group() if size > 1 else None, world.device)
