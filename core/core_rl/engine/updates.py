"""`Updates`: gradient norm, clipping, optimizer steps and the learning rate of a train engine."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from core_rl.config.engine import OptimizerConfig
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.engine.schedule_function import ScheduleFunction
from core_rl.errors import ConfigError, EngineStateError
from core_rl.state.freed_memory import give_back_freed

__all__ = ["Updates", "learning_rate", "schedule_length"]

logger = logging.getLogger(__name__)


class Updates:
    """Decides on steps: clips, skips what is not finite, counts updates; records the version."""

    def __init__(self, runtime: Runtime, modes: Modes) -> None:
        self.runtime = runtime
        self.modes = modes

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update the weights and drop the gradients, or skip; see `TrainEngine.optimizer_step`."""
        run = self.runtime
        optimizer = guards.require_optimizer(run.config)
        if run.pending.failed:
            raise EngineStateError(
                "optimizer_step() after a pass that raised: the gradients are of a part of the batch; call "
                "optimizer_zero_grad() and forward_backward() again"
            )
        if not run.pending.passes:
            raise EngineStateError("optimizer_step() without gradients; call forward_backward() first")
        with self.modes.onloaded("model", "optimizer"), run.rng.own():
            metrics = self._clipped_step(optimizer)
        if run.device.type == "cpu":
            give_back_freed()
        return metrics

    def _clipped_step(self, optimizer: OptimizerConfig) -> dict[str, float]:
        run = self.runtime
        counted, finite = run.pending.weight > 0, run.pending.finite
        norm = self.grad_norm() if counted else 0.0
        lr = self.learning_rate(optimizer)
        successful = counted and finite and math.isfinite(norm)
        if successful:
            count = run.progress.updates + 1
            run.backend.step(self.clip_scale(optimizer, norm), lr, count)
            run.progress = replace(run.progress, updates=count)
        else:
            reason = (
                "no token counts in this batch" if not counted else "the loss or a gradient is not finite"
            )
            logger.warning("optimizer step skipped: %s; weights and moments are unchanged", reason)
        self.modes.zero_grad()
        return {"grad_norm": norm, "lr": lr, "update_successful": float(successful)}

    def clip_scale(self, optimizer: OptimizerConfig, norm: float) -> float:
        """The factor of the gradients that brings their norm down to ``max_grad_norm``."""
        limit = optimizer.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

    def grad_norm(self) -> float:
        """The pre-clip norm of the reduced gradients."""
        self.reduce()
        return self.runtime.tensors.grad_norm()

    def reduce(self) -> None:
        """Reduce the gradients over data-parallel ranks, once."""
        if not self.runtime.pending.reduced:
            self.runtime.backend.reduce_grads()
            self.runtime.pending.reduced = True

    def learning_rate(self, optimizer: OptimizerConfig) -> float:
        """The learning rate of the next step."""
        run = self.runtime
        return learning_rate(optimizer, run.progress.lr_steps, run.schedule_steps, run.schedule_function)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; returns the learning rate of the next step."""
        run = self.runtime
        optimizer = guards.require_optimizer(run.config)
        run.progress = replace(run.progress, lr_steps=run.progress.lr_steps + 1)
        return self.learning_rate(optimizer)

    def set_version(self, version: int) -> None:
        """Record the version of the weights."""
        self.runtime.progress = replace(self.runtime.progress, version=version)


def schedule_length(config: OptimizerConfig, total_train_steps: int | None) -> int | None:
    """Steps until the decay ends: the config's ``schedule_steps``, else ``total_train_steps``.

    None for a constant schedule, and for a function where neither is known; `ConfigError` when a decaying one has no
    end.
    """
    schedule = config.schedule
    total = config.schedule_steps or schedule.total_steps or total_train_steps
    if schedule.function is not None:
        return total
    if schedule.type == "constant":
        return None
    if total is None:
        raise ConfigError(
            f"schedule.type = {schedule.type!r} needs an end; set optimizer.schedule_steps or pass a FinetuneSpec"
        )
    if total <= schedule.warmup_steps:
        raise ConfigError(
            f"optimizer.schedule.warmup_steps = {schedule.warmup_steps}, and the schedule ends after {total} steps: "
            "none is left for the decay; lower it, train for more steps, or set optimizer.schedule_steps"
        )
    return total


def learning_rate(
    config: OptimizerConfig, step: int, total: int | None, function: ScheduleFunction | None = None
) -> float:
    """The learning rate after ``step`` calls of ``lr_scheduler_step()``; a pure function.

    Warm-up is linear and reaches the full rate at ``warmup_steps``; ``cosine`` follows
    Loshchilov and Hutter (arXiv:1608.03983) without restarts. A ``function`` replaces all of it.
    """
    if function is not None:
        return config.lr * function(step, total)
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * (step + 1) / (schedule.warmup_steps + 1)
    if total is None:
        return config.lr
    progress = min(1.0, (step - schedule.warmup_steps) / (total - schedule.warmup_steps))
    remaining = 1.0 - progress if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * remaining)
