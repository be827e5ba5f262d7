"""Remarks on a plan that can run, and is probably not meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.devices import device_type
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.plan.run_plan import PreparedRun, Workload
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["plan_remarks"]

RANKS_PER_CORE = 4
"""More ranks for each CPU core are worth a remark."""
HIGH_LR = 0.1
MANY_PASSES = 100
"""More passes over the data are worth a remark."""


def plan_remarks(recipe: Recipe, prepared: PreparedRun) -> tuple[str, ...]:
    """Remarks on ``recipe`` and its ``prepared`` run."""
    return (
        *_ranks(recipe, prepared),
        *_idle_ranks(prepared),
        *_data(recipe.data, prepared),
        *_passes(recipe.steps, prepared.workload),
        *_steps(recipe),
    )


def _ranks(recipe: Recipe, prepared: PreparedRun) -> Iterator[str]:
    """Remarks on CPU ranks of this machine."""
    placements = prepared.placements
    ranks = sum(
        config.layout.world_size
        for name, (_, config) in prepared.roles.items()
        if isinstance(config, TrainEngineConfig) and placements[name].colocated_with is None
    )
    cores = os.cpu_count() or 1
    if recipe.cluster.is_local and device_type(recipe.device) == "cpu" and ranks > RANKS_PER_CORE * cores:
        yield f"{ranks} ranks on the {cores} cores of this machine: lower the degrees of engines.NAME.layout"


def _idle_ranks(prepared: PreparedRun) -> Iterator[str]:
    """Remarks on data parallel ranks without a sequence."""
    workload = prepared.workload
    sequences = workload.examples_per_step * workload.sequences_per_example
    for name, (_, config) in prepared.roles.items():
        if isinstance(config, TrainEngineConfig) and config.layout.dp > sequences:
            yield (
                f"layout.dp = {config.layout.dp} of the {name} for {sequences} sequences of a step: the other ranks "
                "have none; lower dp, or raise the sequences of a step"
            )


def _data(data: DataSection, prepared: PreparedRun) -> Iterator[str]:
    workload = prepared.workload
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


def _steps(recipe: Recipe) -> Iterator[str]:
    if recipe.data.has_evaluation and recipe.eval_every > recipe.steps:
        yield (
            f"eval_every = {recipe.eval_every} and steps = {recipe.steps}: there are evaluations before and after the "
            "training alone"
        )
    if recipe.optimizer.lr == 0:
        yield "optimizer.lr = 0: the weights stay as they are"
    elif recipe.optimizer.lr >= HIGH_LR:
        yield f"optimizer.lr = {recipe.optimizer.lr:g} is very high; 1e-6 to 1e-3 are usual"
