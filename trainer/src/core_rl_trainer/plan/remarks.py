"""Remarks on a plan that can run, and is probably not meant."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.devices import device_type
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.plan.run_plan import EnginePlan, RunPlan, Schedule, Workload
from core_rl_trainer.recipe.sections import ModelSection

RANKS_PER_CORE = 4
"""More ranks for each CPU core are worth a remark."""
HIGH_LR = 0.1
MANY_PASSES = 100
"""More passes over the data are worth a remark."""


def plan_remarks(plan: RunPlan) -> tuple[str, ...]:
    """Remarks on ``plan``."""
    schedule, workload, data = plan.schedule, plan.workload, plan.recipe.data
    return (
        *_ranks(plan.trainers, plan.cluster.is_local),
        *_idle_ranks(plan.trainers, workload.examples_per_step * workload.sequences_per_example),
        *_data(data, workload),
        *_passes(schedule.steps, workload),
        *_schedule(schedule, data.has_evaluation),
        *_frozen(plan.recipe.model),
    )


def _ranks(trainers: Mapping[str, EnginePlan[TrainEngineConfig]], is_local: bool) -> Iterator[str]:
    """Remarks on CPU ranks of this machine."""
    alone = [plan.config for plan in trainers.values() if plan.colocated_with is None]
    ranks, cores = sum(config.layout.world_size for config in alone), os.cpu_count() or 1
    on_cpu = device_type(alone[0].device) == "cpu"
    if is_local and on_cpu and ranks > RANKS_PER_CORE * cores:
        yield f"{ranks} ranks on the {cores} cores of this machine: lower the degrees of engines.NAME.layout"


def _idle_ranks(trainers: Mapping[str, EnginePlan[TrainEngineConfig]], sequences: int) -> Iterator[str]:
    """Remarks on data parallel ranks without a sequence."""
    for name, plan in trainers.items():
        dp = plan.config.layout.dp
        if dp > sequences:
            yield (
                f"layout.dp = {dp} of the {name} for {sequences} sequences of a step: the other ranks have none; lower "
                "dp, or raise the sequences of a step"
            )


def _data(data: DataSection, workload: Workload) -> Iterator[str]:
    train = {_identity(source) for source in data.train}
    shared = sorted({source.path for source in data.eval or () if _identity(source) in train})
    if shared:
        yield f"data.eval = {', '.join(shared)}: also in data.train, so that evaluations measure what was trained on"
    if workload.examples < workload.examples_per_step:
        yield (
            f"{workload.examples_per_step} examples in a step, and {workload.examples} to train on: each step has some "
            "of them twice"
        )


def _identity(source: DataSource) -> tuple[Path, str | None, str | None]:
    return Path(source.path).resolve(), source.config, source.split


def _passes(steps: int, workload: Workload) -> Iterator[str]:
    passes = steps * workload.examples_per_step / workload.examples
    if passes > MANY_PASSES:
        yield (
            f"steps = {steps:,} with {workload.examples_per_step} examples each are {passes:,.0f} passes over the "
            f"{workload.examples:,} examples: lower steps, or set epochs"
        )


def _schedule(schedule: Schedule, has_evaluation: bool) -> Iterator[str]:
    if has_evaluation and schedule.eval_every > schedule.steps:
        yield (
            f"eval_every = {schedule.eval_every} and steps = {schedule.steps}: there are evaluations before and after "
            "the training alone"
        )
    lr = schedule.optimizer.lr
    if lr == 0:
        yield "optimizer.lr = 0: the weights stay as they are"
    elif lr >= HIGH_LR:
        yield f"optimizer.lr = {lr:g} is very high; 1e-6 to 1e-3 are usual"


def _frozen(model: ModelSection) -> Iterator[str]:
    if model.frozen and model.lora is not None:
        yield (
            f"model.frozen = {list(model.frozen)} beside model.lora changes nothing: the adapter alone is trained, in "
            "the layers of model.lora.target_modules"
        )
