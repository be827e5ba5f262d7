"""The report of a plan: steps, tokens, and the memory of each role, for ``core-rl train --dry-run``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from core_rl.config.engine import EngineConfig, TrainEngineConfig
from core_rl.toolkit.footprint import Footprint, footprint_of
from core_rl_trainer.data.statistics import DataStatistics
from core_rl_trainer.plan.memory import BYTES, MemoryEstimate, estimate_memory
from core_rl_trainer.plan.run_plan import EnginePlan, RunPlan, Schedule, Workload
from core_rl_trainer.plan.slots import describe_slots

__all__ = ["PlanReport", "RankReport", "RoleReport", "report_plan"]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank of a train engine."""

    rank: int
    coordinates: dict[str, int]
    """Coordinates along ``tp``, ``cp``, ``dp`` and ``pp``."""
    sequences: int
    """Upper bound for one pass over a step's sequences; ranks with the same ``dp`` see the same ones."""
    micro_batches: int
    """Upper bound for these sequences."""


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """The engine of one role, with the memory of each rank."""

    role: str
    engine: str
    layout: str
    dtype: str
    device: str
    model: Footprint
    memory: MemoryEstimate
    ranks: tuple[RankReport, ...]
    """Empty for an inference engine, which plans its own."""
    machines: tuple[int, ...] = ()
    """The number of each rank's machine."""
    devices: tuple[int, ...] = ()
    """The number of each rank's device there."""
    place: str = ""
    """Machines and devices in words."""
    colocated_with: str | None = None
    """The role in whose processes the engine lives; null where it has its own."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A whole run."""

    algorithm: str
    output_dir: str
    steps: int
    workload: Workload
    data: DataStatistics
    end_tokens: Mapping[int, str]
    """Texts of the tokens that end a sequence, by id."""
    passes: float
    """Over the examples to train on."""
    sequences_per_step: int
    tokens_per_step: int
    """Upper bound."""
    micro_batch_tokens: int
    evaluations: int
    checkpoints: int
    off_policyness: int
    """The largest lag of a completion, in weight versions; 0 is a synchronous run."""
    colocated: bool
    """Whether roles on the same devices are offloaded while others work."""
    cluster: str
    """The machines, in words."""
    roles: tuple[RoleReport, ...]
    remarks: tuple[str, ...] = ()
    """Settings that are probably not meant."""


def report_plan(plan: RunPlan) -> PlanReport:
    """The report of ``plan``. Models are counted, not built; nothing is started."""
    workload, schedule = plan.workload, plan.schedule
    sequences = workload.examples_per_step * workload.sequences_per_example
    return PlanReport(
        algorithm=plan.algorithm.type_,
        output_dir=str(plan.files.directory),
        steps=schedule.steps,
        workload=workload,
        data=plan.statistics,
        end_tokens=plan.end_tokens,
        passes=schedule.steps * workload.examples_per_step / workload.examples,
        sequences_per_step=sequences,
        tokens_per_step=sequences * workload.longest,
        micro_batch_tokens=plan.micro_batch_tokens,
        evaluations=_evaluations(schedule) if workload.held_out else 0,
        checkpoints=len(
            {schedule.steps, *range(schedule.save_every, schedule.steps + 1, schedule.save_every)}
        ),
        off_policyness=plan.rollouts.max_head_offpolicyness,
        colocated=plan.colocated,
        cluster=str(plan.cluster),
        roles=tuple(
            _role(name, engine, sequences, workload.longest, plan.micro_batch_tokens)
            for name, engine in plan.engines.items()
        ),
        remarks=plan.remarks,
    )


def _evaluations(schedule: Schedule) -> int:
    every = schedule.eval_every or schedule.steps
    return len({0, schedule.steps, *range(every, schedule.steps + 1, every)})


def _role(
    name: str, engine: EnginePlan[EngineConfig], sequences: int, longest: int, budget: int
) -> RoleReport:
    config = engine.config
    model = footprint_of(config.model)
    ranks: tuple[RankReport, ...] = ()
    memory = MemoryEstimate(weights=BYTES[config.dtype] * model.parameters / config.layout.tp)
    if isinstance(config, TrainEngineConfig):
        ranks = tuple(_ranks(config, sequences, longest, budget))
        tokens = min(budget, max(rank.sequences for rank in ranks) * longest)
        memory = estimate_memory(config, model, tokens)
    return RoleReport(
        role=name,
        engine=engine.spec.name,
        layout=str(config.layout),
        dtype=config.dtype,
        device=config.device,
        model=model,
        memory=memory,
        ranks=ranks,
        machines=tuple(slot.machine for slot in engine.slots),
        devices=tuple(slot.device for slot in engine.slots),
        place=describe_slots(engine.slots),
        colocated_with=engine.colocated_with,
    )


def _ranks(config: TrainEngineConfig, sequences: int, longest: int, budget: int) -> Iterator[RankReport]:
    share = math.ceil(sequences / config.layout.dp)
    in_micro_batch = max(1, budget // longest)  # sequences, if all are as long as the longest
    for rank in range(config.layout.world_size):
        yield RankReport(
            rank=rank,
            coordinates=config.layout.coordinates(rank),
            sequences=share,
            micro_batches=math.ceil(share / in_micro_batch),
        )
