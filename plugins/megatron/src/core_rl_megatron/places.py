"""The ranks of a Megatron engine: Megatron's groups, and what the core has to know of them.

Megatron counts ranks in the order tp, cp, dp, pp: tensor parallel ranks are neighbours, and the ranks
of one pipeline stage stand together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import EngineStateError, LayoutError
from core_rl.toolkit.parallel_context import ModelShards

__all__ = ["Places", "TrackedDraws", "leave_groups", "make_groups"]


@dataclass(frozen=True)
class Places:
    """Where a rank stands."""

    groups: RankGroups
    shards: ModelShards
    """How one copy of the model and its tokens are spread, but for stages."""
    copy: Comm
    """Ranks that hold one copy of all tensors between them."""


def make_groups(world: Comm, layout: ParallelLayout, virtual_stages: int, timeout_s: float) -> Places:
    """Make Megatron's process groups, and those that the core needs beside them, or share what is there. Collective.

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
    _Present.enter(_Degrees(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, virtual_stages), timeout_s)
    own = _model_parallel_ranks(layout, world.rank)
    model_parallel = _world(world, own, _model_parallel_group(world, layout))
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
    """The inverse of `make_groups`: the last engine has Megatron forget its groups, so that the next makes its own."""
    _Present.engines -= 1
    if not _Present.engines:
        mpu.destroy_model_parallel()


class _Degrees(NamedTuple):
    """What Megatron's groups depend on."""

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


class TrackedDraws:
    """The random states of Megatron's tracker, which a process has once, as one engine left them.

    Tensor parallel ranks drop different elements, others the same.
    """

    def __init__(self, seed: int) -> None:
        # Offsets as in Megatron's model_parallel_cuda_manual_seed, which would also seed the global generator.
        own = seed + 2718 + mpu.get_tensor_model_parallel_rank()
        expert = own + 1024 + 100 * mpu.get_expert_model_parallel_rank()
        initialize_rng_tracker()
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("data-parallel-rng", seed)
        tracker.add("model-parallel-rng", own)
        tracker.add("expert-parallel-rng", expert)
        self.states: dict[str, Tensor] = tracker.get_states()

    @contextmanager
    def own(self) -> Iterator[None]:
        """The engine's states inside the context; they go on where the last one ended."""
        tracker = get_cuda_rng_tracker()
        tracker.set_states(self.states)
        try:
            yield
        finally:
            self.states = tracker.get_states()


def _model_parallel_ranks(layout: ParallelLayout, rank: int) -> list[int]:
    """The ranks that see the same sequences as ``rank``, in rising order."""
    near = layout.tp * layout.cp
    data = rank // near % layout.dp
    return [near * (data + layout.dp * stage) + i for stage in range(layout.pp) for i in range(near)]


def _model_parallel_group(world: Comm, layout: ParallelLayout) -> Any:
    near = layout.tp * layout.cp
    size = near * layout.pp
    if size == 1 or size == world.size:
        return world.group
    key = (Places, near, layout.pp, layout.dp)
    if key not in world.shared:
        lists = [_model_parallel_ranks(layout, near * data) for data in range(layout.dp)]
        world.shared[key], _ = dist.new_subgroups_by_enumeration(lists)
    return world.shared[key]


def _world(world: Comm, ranks: Sequence[int], group: Any) -> Comm:
    return Comm(group if len(ranks) > 1 else None, world.device)


def _of(world: Comm, size: int, group: Any) -> Comm:
    """Megatron's group as a `Comm`; a lone rank needs none."""
    return Comm(group() if size > 1 else None, world.device)
