"""The same function on several ranks, each in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from core_rl.distributed.process_group import RankAddress

__all__ = ["Work", "each_rank", "join_group"]

Work = Callable[[RankAddress, argparse.Namespace], None]


def each_rank(work: Work, ranks: int, arguments: argparse.Namespace) -> None:
    """Run ``work(address, arguments)`` in ``ranks`` fresh processes with ``arguments.threads`` threads each."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        multiprocessing.spawn(_entry, (work, ranks, store, arguments), nprocs=ranks)


def join_group(address: RankAddress) -> None:
    """Join the process group as an engine does, for scripts without one."""
    store = dist.FileStore(address.store_path, address.world_size)
    dist.init_process_group("gloo", store=store, rank=address.rank, world_size=address.world_size)


def _entry(rank: int, work: Work, ranks: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    address = RankAddress(rank=rank, world_size=ranks, store_path=store, local_rank=rank)
    work(address, arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
