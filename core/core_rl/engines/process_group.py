"""Joining and leaving ``torch.distributed``."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from core_rl.engines.collectives import World
from core_rl.engines.meta import RankAddress
from core_rl.errors import ConfigError, EngineStateError

__all__ = ["Membership", "join", "pick_device"]


@dataclass(frozen=True)
class Membership:
    """A rank's place in ``torch.distributed``, and whether it is ours to give up."""

    address: RankAddress
    world: World
    owned: bool

    def leave(self) -> None:
        """Destroy the process group if `join` created it."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def pick_device(choice: str, local_rank: int) -> torch.device:
    """The device that a config's ``device`` stands for on this rank."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError("device = 'cuda', and torch sees no CUDA device; set device to 'cpu' or 'auto'")
    if choice == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(address: RankAddress | None, device: torch.device) -> Membership:
    """Join the process group at ``address``.

    Without an address, the group that the caller has already initialised (``torchrun``) is used,
    and else a group of one rank is made.
    """
    if dist.is_initialized():
        if address is not None:
            raise EngineStateError(
                "torch.distributed is already initialised in this process; destroy the other engine "
                "first, or pass no address to use the group that is there"
            )
        present = RankAddress(rank=dist.get_rank(), world_size=dist.get_world_size(), store_path="")
        return Membership(present, World(dist.group.WORLD), owned=False)
    if address is None:
        store = Path(tempfile.mkdtemp(prefix="core-rl-")) / "store"
        address = RankAddress(rank=0, world_size=1, store_path=str(store))
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        store=FileStore(address.store_path, address.world_size),
        rank=address.rank,
        world_size=address.world_size,
        timeout=timedelta(seconds=address.timeout_s),
    )
    return Membership(address, World(dist.group.WORLD), owned=True)
