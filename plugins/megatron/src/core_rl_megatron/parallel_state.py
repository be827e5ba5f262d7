"""Process groups of a Megatron engine: Megatron's own, and those that the core needs.

Megatron counts ranks in the order tp, cp, dp, pp: tensor parallel ranks are neighbours, and so are the ranks of one
pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import EngineStateError, LayoutError
from core_rl.toolkit.parallel_context import ModelShards

__all__ = ["ParallelState", "join_groups", "leave_groups"]


@dataclass(frozen=True)
class ParallelState:
    """Process groups of one engine."""

    groups: RankGroups
    shards: ModelShards
    """Context and tensor parallel ranks of one pipeline stage."""


def join_groups(world: Comm, layout: ParallelLayout, virtual_stages: int) -> ParallelState:
    """Create Megatron's process groups, or share those of another engine of this process. Collective.

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
    _Present.enter(
        _Degrees(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, virtual_stages), world.timeout_s
    )
    try:
        return _parallel_state(world, layout)
    except BaseException:
        leave_groups()
        raise


def leave_groups() -> None:
    """The inverse of `join_groups`: after the last engine Megatron has no groups, so that the next makes its own."""
    _Present.engines -= 1
    if not _Present.engines:
        mpu.destroy_model_parallel()


def _parallel_state(world: Comm, layout: ParallelLayout) -> ParallelState:
    size = layout.tp * layout.cp * layout.pp
    groups = RankGroups(
        data_parallel=_comm(world, layout.dp, mpu.get_data_parallel_group),
        model_parallel=_comm(world, size, lambda: _model_parallel_group(world, layout)),
        # The first rank of the last stage.
        output_source=layout.tp * layout.cp * (layout.pp - 1),
    )
    shards = ModelShards(
        context=_comm(world, layout.cp, mpu.get_context_parallel_group),
        tensor=_comm(world, layout.tp, mpu.get_tensor_model_parallel_group),
        sequence_parallel=layout.sequence_parallel,
    )
    return ParallelState(groups, shards)


class _Degrees(NamedTuple):
    """The parallel degrees of Megatron's groups."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    virtual_stages: int


class _Present:
    """Megatron's groups of this process, and how many engines use them."""

    degrees: _Degrees | None = None
    engines: int = 0

    @classmethod
    def enter(cls, degrees: _Degrees, timeout_s: float) -> None:
        if not cls.engines:
            _initialize(degrees, timeout_s)
            cls.degrees = degrees
        elif cls.degrees != degrees:
            raise EngineStateError(
                f"this process has Megatron groups for {_text(cls.degrees)}, Megatron-Core keeps one set of them, and "
                f"this engine needs {_text(degrees)}; give it these degrees, destroy() the other engine first, or give "
                "it processes of its own (EngineGroup without colocate_with)"
            )
        cls.engines += 1


def _text(degrees: _Degrees | None) -> str:
    return " ".join(f"{name}={value}" for name, value in degrees._asdict().items()) if degrees else "none"


def _initialize(degrees: _Degrees, timeout_s: float) -> None:
    if mpu.model_parallel_is_initialized():
        raise EngineStateError(
            "this process has Megatron groups that no engine made, and Megatron-Core keeps one set of them; destroy "
            "them first (parallel_state.destroy_model_parallel), or give the engine processes of its own (EngineGroup)"
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=degrees.virtual_stages if degrees.virtual_stages > 1 else None,
        context_parallel_size=degrees.cp,
        expert_model_parallel_size=degrees.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )


def _model_parallel_group(world: Comm, layout: ParallelLayout) -> Any:
    """The group of the ranks that see the same sequences as this one; Megatron has none with context parallelism."""
    near = layout.tp * layout.cp
    if near * layout.pp == world.size:
        return world.group
    key = (ParallelState, near, layout.pp, layout.dp)
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
