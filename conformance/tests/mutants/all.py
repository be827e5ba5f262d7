"""Every mutant of the zoo."""

from __future__ import annotations

from mutants import (
    checkpoints,
    loss_scale,
    outputs,
    pairs,
    rollout_draws,
    rollout_pairs,
    rollouts,
    small_batches,
    steps,
    tensor_parallel,
    tensor_parallel_state,
    updates,
)

MUTANTS = (
    *loss_scale.MUTANTS,
    *small_batches.MUTANTS,
    *outputs.MUTANTS,
    *steps.MUTANTS,
    *checkpoints.MUTANTS,
    *pairs.MUTANTS,
    *tensor_parallel.MUTANTS,
    *tensor_parallel_state.MUTANTS,
    *rollouts.MUTANTS,
    *rollout_draws.MUTANTS,
    *updates.MUTANTS,
    *rollout_pairs.MUTANTS,
)
