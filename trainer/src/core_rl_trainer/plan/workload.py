"""Bounds on the sequences and tokens of each training step."""

from __future__ import annotations

import sys

from core_rl.config.base import Config
from core_rl.errors import ConfigError
from core_rl_trainer.algorithms.updates import UpdatesConfig
from core_rl_trainer.data.training_data import TrainingData
from core_rl_trainer.plan.run_plan import Workload
from core_rl_trainer.recipe.rollout import RolloutSection

__all__ = ["online_workload", "require_budget", "supervised_workload"]


def supervised_workload(data: TrainingData, batch_size: int) -> Workload:
    """The workload of training on ``data`` alone, with ``batch_size`` examples a step."""
    datasets = [dataset for dataset in (data.train, data.held_out) if dataset is not None]
    return Workload(
        examples=len(data.train),
        held_out=0 if data.held_out is None else len(data.held_out),
        examples_per_step=batch_size,
        sequences_per_example=2 if data.kind.paired else data.train.most_sequences,
        longest=data.train.longest,
        largest_unit=max(dataset.largest_unit for dataset in datasets),
    )


def online_workload(
    data: TrainingData, rollout: RolloutSection, completion: int, context: int | None, config: Config
) -> Workload:
    """The workload of training on rollouts of at most ``completion`` tokens each."""
    longest = min(data.train.longest + completion, context or sys.maxsize)
    return Workload(
        examples=len(data.train),
        held_out=0 if data.held_out is None else len(data.held_out),
        examples_per_step=rollout.prompts_per_step,
        sequences_per_example=rollout.group_size,
        longest=longest,
        largest_unit=longest,
        updates_per_step=config.minibatches * config.epochs if isinstance(config, UpdatesConfig) else 1,
    )


def require_budget(largest: int, budget: int) -> None:
    """Raise `ConfigError` where ``largest`` tokens that stay in one micro-batch exceed its ``budget``."""
    if largest > budget:
        raise ConfigError(
            f"micro_batch_tokens = {budget:,}, and a sequence or pair that stays in one micro-batch may have "
            f"{largest:,} tokens, the completion included: raise micro_batch_tokens to {largest:,}, or lower "
            "rollout.max_new_tokens, or take shorter examples"
        )
