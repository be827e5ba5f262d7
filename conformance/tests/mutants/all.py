"""Every mutant of the zoo."""

from __future__ import annotations

from mutants import (
    checkpoints,
    context_parallel,
    loss_scale,
    moments,
    offload,
    optimizers,
    outputs,
    outputs_more,
    pairs,
    precision,
    rollout_details,
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
    *outputs_more.MUTANTS,
    *steps.MUTANTS,
    *optimizers.MUTANTS,
    *checkpoints.MUTANTS,
    *moments.MUTANTS,
    *offload.MUTANTS,
    *precision.MUTANTS,
    *pairs.MUTANTS,
    *context_parallel.MUTANTS,
    *tensor_parallel.MUTANTS,
    *tensor_parallel_state.MUTANTS,
    *rollouts.MUTANTS,
    *rollout_draws.MUTANTS,
    *rollout_details.MUTANTS,
    *updates.MUTANTS,
    *rollout_pairs.MUTANTS,
)
