"""Megatron's state of a process, which all of its engines share: process groups and the random number tracker.

Megatron counts ranks in the order tp, cp, dp, pp: tensor parallel ranks are neighbours, and so are the ranks of one
pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import EngineStateError, LayoutError
from core_rl.seeds import derive_seed
from core_rl.toolkit.parallel_context import ModelShards


class _Present:
    """Megatron's groups of this process, and how many engines use them."""

    degrees: ClassVar[dict[str, int]] = {}
    world: dist.ProcessGroup | None = None
    """All ranks when the groups were made."""
    engines: int = 0


def join_groups(world: Comm, layout: ParallelLayout, virtual_stages: int) -> None:
    """Create Megatron's process groups, or share the groups of another engine of this process. Collective.

    Megatron-Core keeps one set of groups in a process, so its engines have the same degrees; each calls
    `leave_groups`. Raises `LayoutError` for virtual stages without a pipeline, and `EngineStateError` where the process
    has other groups already.
    """
    if virtual_stages > 1 and layout.pp == 1:
        raise LayoutError(
            f"options.virtual_stages={virtual_stages} needs a pipeline, and pp=1 is none; raise pp or set it to 1"
        )
    if layout.ep > 1 and (layout.dp * layout.cp * layout.tp) % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} must divide dp*cp*tp={layout.dp * layout.cp * layout.tp}, the ranks of one stage"
        )
    degrees = layout.model_dump(exclude={"sequence_parallel"}) | {"virtual_stages": virtual_stages}
    if not _Present.engines:
        _initialize(layout, virtual_stages, world.timeout_s)
        _Present.degrees, _Present.world = degrees, world.group
    elif _Present.degrees != degrees:
        present, requested = (
            " ".join(f"{name}={value}" for name, value in of.items()) for of in (_Present.degrees, degrees)
        )
        raise EngineStateError(
            f"this process has Megatron groups for {present}, Megatron-Core keeps one set of them, and this engine "
            f"needs {requested}; give it these degrees, destroy() the other engine first, or give it processes of "
            "its own (EngineGroup without colocate_with)"
        )
    _Present.engines += 1


def leave_groups() -> None:
    """The inverse of `join_groups`: after the last engine Megatron has no groups, so that the next makes its own."""
    _Present.engines -= 1
    if _Present.engines:
        return
    if dist.is_initialized() and dist.group.WORLD is _Present.world:
        # Megatron only forgets them, and each has threads that live as long as the group of all ranks.
        for group in filter(None, mpu._global_process_group_list):
            dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def _initialize(layout: ParallelLayout, virtual_stages: int, timeout_s: float) -> None:
    if mpu.model_parallel_is_initialized():
        raise EngineStateError(
            "this process has Megatron groups that no engine made, and Megatron-Core keeps one set of them; destroy "
            "them first (parallel_state.destroy_model_parallel), or give the engine processes of its own (EngineGroup)"
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


def rank_groups(world: Comm, layout: ParallelLayout) -> RankGroups:
    """The groups that the core needs, after `join_groups`. Collective."""
    stage = layout.tp * layout.cp
    return RankGroups(
        data_parallel=_comm(world, layout.dp, mpu.get_data_parallel_group),
        model_parallel=_comm(world, stage * layout.pp, lambda: _model_parallel_group(world, layout)),
        # The first rank of the last stage.
        output_source=stage * (layout.pp - 1),
    )


def model_shards(world: Comm, layout: ParallelLayout) -> ModelShards:
    """Context and tensor parallel ranks of one pipeline stage, after `join_groups`. No collective."""
    return ModelShards(
        context=_comm(world, layout.cp, mpu.get_context_parallel_group),
        tensor=_comm(world, layout.tp, mpu.get_tensor_model_parallel_group),
        sequence_parallel=layout.sequence_parallel,
    )


def _model_parallel_group(world: Comm, layout: ParallelLayout) -> Any:
    """The group of the ranks that see the same sequences as this one; Megatron has none with context parallelism."""
    near = layout.tp * layout.cp
    if near * layout.pp == world.size:
        return world.group
    key = (_Present, near, layout.pp, layout.dp)
    if key not in world.shared:
        lists = [
            [near * (data + layout.dp * stage) + i for stage in range(layout.pp) for i in range(near)]
            for data in range(layout.dp)
        ]
        world.shared[key], _ = dist.new_subgroups_by_enumeration(lists)
    return world.shared[key]


def _comm(world: Comm, size: int, group: Callable[[], Any]) -> Comm:
    """A `Comm` over ``group()``; a lone rank needs none."""
    return Comm(group() if size > 1 else None, world.device)


class MegatronRngState:
    """States of the tracker by name, uint8. A process has one tracker, and each engine swaps its states in.

    Tensor parallel ranks drop different elements of sharded tensors, and the same elements of replicated ones.
    Ranks with other sequences, tokens or layers drop others of everything.
    """

    def __init__(self, seed: int, data_parallel_rank: int) -> None:
        # Megatron itself draws the same numbers on all data and context parallel ranks.
        seed = derive_seed(
            seed, data_parallel_rank, mpu.get_context_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
        )
        # Offsets as in Megatron's model_parallel_cuda_manual_seed, which would also seed the global generator.
        tensor_seed = seed + 2718 + mpu.get_tensor_model_parallel_rank()
        initialize_rng_tracker()
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("data-parallel-rng", seed)
        tracker.add("model-parallel-rng", tensor_seed)
        tracker.add("expert-parallel-rng", tensor_seed + 1024 + 100 * mpu.get_expert_model_parallel_rank())
        self.states: dict[str, Tensor] = tracker.get_states()

    def load(self, states: Mapping[str, Tensor]) -> None:
        self.states |= {name: states[name] for name in self.states if name in states}

    @contextmanager
    def own(self) -> Iterator[None]:
        """The engine's states inside the context; they continue where the last one ended."""
        tracker = get_cuda_rng_tracker()
        tracker.set_states(self.states)
        try:
            yield
        finally:
            self.states = tracker.get_states()
