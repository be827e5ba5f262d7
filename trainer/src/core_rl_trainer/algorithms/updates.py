"""Several optimizer steps on one batch: minibatches, epochs, and an end before the last of them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from core_rl.backend.loss import LossSpec
from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, shard
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl_trainer.algorithms.interface import TrainEngineLike


class UpdatesConfig(Config):
    """The number of optimizer steps on a batch."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass over the batch."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch."""


def peers(engine: TrainEngineLike) -> Comm:
    """The ranks that hold the other parts of the batch: none behind a group, whose driver holds it all."""
    return engine.data_parallel_group if isinstance(engine, TrainEngine) else Comm()


def run_updates(
    engine: TrainEngineLike,
    batch: SequenceBatch,
    loss: LossSpec,
    mb_spec: MicroBatchSpec,
    config: UpdatesConfig,
    max_kl: float | None = None,
) -> list[dict[str, float]]:
    """The metrics of each optimizer step on ``batch``, in order; at least one.

    With ``max_kl`` the update whose ``approx_kl`` is above it is the last one: it is measured before its step.
    """
    parts = shard(batch, config.minibatches)
    sizes = peers(engine).max([float(part.num_sequences) for part in parts])
    filled = [part for part, size in zip(parts, sizes, strict=True) if size]
    updates: list[dict[str, float]] = []
    for part in filled * config.epochs:
        updates.append(engine.train_batch(part, loss, mb_spec))
        if max_kl is not None and updates[-1].get("approx_kl", 0.0) > max_kl:
            break
    return updates


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several updates: means, and extremes of ``_max`` and ``_min``. A skipped update may lack some."""
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        pick = max if name.endswith("_max") else min if name.endswith("_min") else None
        merged[name] = pick(values) if pick else sum(values) / len(values)
    return merged | {"updates": float(len(updates))}
