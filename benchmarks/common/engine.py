"""Engines on the benchmarks' work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.workload import MODEL, token_nll
from core_rl import (
    LossSpec,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngine,
    get_spec,
    load_config,
    load_engine,
)
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.process_group import RankAddress

__all__ = ["engine_step", "fsdp_engine", "megatron_engine"]


def fsdp_engine(
    address: RankAddress | None = None,
    *,
    ranks: int = 1,
    path: str | None = None,
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> TrainEngine:
    """An engine with the benchmarks' model, or that of directory ``path``; without an address the group is there.

    ``model`` gives further fields of the model's config.
    """
    chosen = {"config": MODEL} if path is None else {"path": path}
    return _engine("fsdp", address, ranks, {**chosen, **(model or {})}, options)


def megatron_engine(
    address: RankAddress | None = None, *, ranks: int = 1, options: dict[str, Any] | None = None
) -> TrainEngine:
    """The same of Megatron."""
    return _engine("megatron", address, ranks, {"config": MODEL}, options)


def _engine(
    name: str,
    address: RankAddress | None,
    ranks: int,
    model: dict[str, Any],
    options: dict[str, Any] | None,
) -> TrainEngine:
    spec = get_spec(name)
    config = load_config(spec).model_validate(
        {
            "model": model,
            "optimizer": OptimizerConfig(lr=1e-4, weight_decay=0.01),
            "layout": ParallelLayout(dp=ranks),
            "options": options or {},
        }
    )
    engine = load_engine(spec, config)
    engine.initialize(address)
    return engine


def engine_step(engine: TrainEngine, batch: SequenceBatch, budget: int) -> Callable[[], None]:
    """One optimizer step on ``batch``, packed to ``budget`` tokens."""
    loss, micro_batches = LossSpec(fn=token_nll), MicroBatchSpec(max_tokens=budget)

    def step() -> None:
        engine.train_batch(batch, loss, micro_batches)

    return step
