"""Training steps of engines on the benchmarks' work, on one rank or several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from common.workload import MODEL, token_nll
from core_rl import LossSpec, MicroBatchSpec, TrainEngine, load_config, load_engine
from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.process_group import RankAddress, StoreAddress, open_store

Work = Callable[[RankAddress, argparse.Namespace], None]
HOST = "127.0.0.1"


def work_of(batch: SequenceBatch, budget: int, ranks: int) -> str:
    """The work of a step in a title."""
    places = "one rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"{places}, {batch.num_sequences} sequences, {batch.num_tokens} tokens, packed to {budget}, float32"
    )


def each_rank(work: Work, ranks: int, arguments: argparse.Namespace) -> None:
    """Run ``work(address, arguments)`` in ``ranks`` fresh processes with ``arguments.threads`` threads each."""
    store = open_store(HOST)
    store_address = StoreAddress(host=HOST, port=store.port, name="benchmark")
    multiprocessing.spawn(_entry, (work, ranks, store_address, arguments), nprocs=ranks)


def _entry(
    rank: int, work: Work, ranks: int, store_address: StoreAddress, arguments: argparse.Namespace
) -> None:
    torch.set_num_threads(arguments.threads or max(1, 2 // ranks))
    address = RankAddress(rank=rank, world_size=ranks, store=store_address, local_rank=rank)
    work(address, arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def start_engine(
    name: str, address: RankAddress | None = None, fields: Mapping[str, Any] = MappingProxyType({})
) -> TrainEngine:
    """A train engine with the benchmarks' model and optimizer, or with the ``fields`` of its config in their place.

    Without an address it joins the process group that is there.
    """
    values = {"model": {"config": MODEL}, "optimizer": {"lr": 1e-4, "weight_decay": 0.01}, **fields}
    config = parse_config(load_config(name), values)
    assert isinstance(config, TrainEngineConfig)
    engine = load_engine(name, config)
    engine.initialize(address)
    return engine


def engine_step(engine: TrainEngine, batch: SequenceBatch, budget: int) -> Callable[[], object]:
    """One optimizer step on ``batch``, packed to ``budget`` tokens."""
    return partial(engine.train_batch, batch, LossSpec(fn=token_nll), MicroBatchSpec(max_tokens=budget))
