"""Joining and leaving the process group of ``torch.distributed``, which all engines of a process share."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from core_rl.distributed.comm import Comm
from core_rl.errors import ConfigError, EngineStateError


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The variables of one launcher."""

    rank: str
    world_size: str
    local_rank: str


LAUNCHERS = {
    "torchrun": _Names(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK"),
    # Slurm sets SLURM_NTASKS for the batch script as well, which runs once.
    "srun": _Names(rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchedWorld:
    """Rank of this process in the world of a launcher."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    """Number on its machine, and of its device."""

    def __str__(self) -> str:
        names = LAUNCHERS[self.launcher]
        return (
            f"one of {self.world_size} processes that {self.launcher} started ({names.rank}={self.rank}, "
            f"{names.world_size}={self.world_size})"
        )

    def leader(self) -> tuple[str, int]:
        """The host name of rank 0 and the port where it is to be met.

        Raises `ConfigError` where the environment has none.
        """
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                f"this is {self}, and MASTER_ADDR={host!r}, MASTER_PORT={port!r} do not say where they meet: set them "
                "to the host of rank 0 and a free port of it, the same for all (under Slurm, "
                "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))"
            )
        return host, int(port)


def launched_world() -> LaunchedWorld | None:
    """The world of several processes that a launcher has started this one for; None for a process of its own."""
    for launcher, names in LAUNCHERS.items():
        texts = [os.environ.get(name, "") for name in (names.rank, names.world_size, names.local_rank)]
        rank, size, local = (int(text) if text.isdigit() else None for text in texts)
        if rank is not None and size is not None and size > 1:
            device_number = rank if local is None else local
            return LaunchedWorld(launcher=launcher, rank=rank, world_size=size, local_rank=device_number)
    return None


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Rendezvous of ranks: a store of one process (`open_store`), and a name in it."""

    host: str
    port: int
    name: str
    """Name of one process group; the store may serve several in turn."""


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """The number of one rank, and where it meets the others."""

    rank: int
    world_size: int
    store: StoreAddress | None = None
    """None for a world of one rank."""
    local_rank: int = 0
    """The accelerator of this rank on its machine."""
    timeout_s: float = 600.0
    """The longest time that a collective waits for its peers, in seconds."""


@dataclass
class _Present:
    """The process group of this process."""

    current: ClassVar[_Present | None] = None

    address: RankAddress
    device: torch.device
    owned: bool
    """True if `join` created it; the last engine that leaves then destroys it."""
    group: dist.ProcessGroup | None = field(default_factory=lambda: dist.group.WORLD)
    shared: dict[object, Any] = field(default_factory=dict)
    """See `Comm.shared`."""
    members: list[Membership] = field(default_factory=list)

    def is_there(self) -> bool:
        """True while ``torch.distributed`` has this group; its creator may have destroyed it."""
        return dist.is_initialized() and dist.group.WORLD is self.group


class Membership:
    """The membership of an engine in the process group."""

    def __init__(self, present: _Present, device: torch.device) -> None:
        self.address = present.address
        """The address with which the first engine of this process joined."""
        self.world = Comm(present.group, device, present.shared, present.address.timeout_s)
        """All ranks."""
        self._present = present
        present.members.append(self)

    def leave(self) -> None:
        """Leave the process group; the last engine here destroys it if `join` created it."""
        present = self._present
        if self not in present.members:
            return
        present.members.remove(self)
        if present.members:
            return
        if _Present.current is present:
            _Present.current = None
        if present.owned and present.is_there():
            dist.destroy_process_group()


def listen_on(host: str) -> socket.socket:
    """A socket that listens on ``host``, an address of this machine, on a free port. Raises ``OSError``."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def open_store(host: str) -> TCPStore:
    """A store that listens on ``host``, an address of this machine, on a port that is free; see its ``port``.

    It listens until it is collected, so no other process can take its port.
    """
    listener = listen_on(host)
    port = listener.getsockname()[1]
    # The store closes it. By itself, it would listen on all interfaces.
    descriptor = listener.detach()
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)


def require_single_process(subject: str, remedy: str) -> None:
    """Raise `ConfigError` if a launcher started several processes, as each would train a model of its own."""
    if (world := launched_world()) is not None:
        raise ConfigError(
            f"{subject} in {world}: each of them would train a model of its own. {remedy}. If nothing but left-over "
            f"variables looks like {world.launcher}, unset them"
        )


def local_index(address: RankAddress | None) -> int | None:
    """Number of this process on its machine; None without a launcher."""
    if address is not None:
        return address.local_rank
    return None if (launched := launched_world()) is None else launched.local_rank


def join(address: RankAddress | None, device: torch.device) -> Membership:
    """Join the process group at ``address``, or share it with the engines of this process that are in it.

    Without an address, the existing group is used (that of other code, or of another engine), or else that of the
    processes that ``torchrun`` or ``srun`` started, or else a group of one rank is created. Raises `EngineStateError`
    if another group exists, and `ConfigError` where the environment has no address of rank 0.
    """
    present = _Present.current
    if present is None or not present.is_there():
        adopts = dist.is_initialized() and address is None
        _Present.current = present = _adopt(device) if adopts else _initialize(address, device)
    elif address is not None and not _same(present, address, device):
        raise EngineStateError(
            f"this engine is to be rank {address.rank} of {address.world_size} on {device}, and torch.distributed is "
            f"already initialised in this process, as rank {present.address.rank} of {present.address.world_size} on "
            f"{present.device}; engines share a process only in the same world: destroy the other engine first, or "
            "give this one processes of its own (EngineGroup without colocate_with)"
        )
    return Membership(present, device)


def _same(present: _Present, address: RankAddress, device: torch.device) -> bool:
    fields = attrgetter("store", "rank", "world_size")
    return bool(fields(present.address) == fields(address)) and present.device == device


def _adopt(device: torch.device) -> _Present:
    """The group that other code initialised."""
    address = RankAddress(rank=dist.get_rank(), world_size=dist.get_world_size())
    return _Present(address, device, owned=False)


def _initialize(address: RankAddress | None, device: torch.device) -> _Present:
    if dist.is_initialized():
        raise EngineStateError(
            "torch.distributed is already initialised in this process by other code; pass no address to use "
            "that group"
        )
    launched = launched_world() if address is None else None
    if launched is not None:
        address = RankAddress(
            rank=launched.rank, world_size=launched.world_size, local_rank=launched.local_rank
        )
    address = address or RankAddress(rank=0, world_size=1)
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        store=_store(address, launched),
        rank=address.rank,
        world_size=address.world_size,
        timeout=timedelta(seconds=address.timeout_s),
        # On CUDA it also makes NCCL split communicators, instead of making each anew.
        device_id=None if device.type == "cpu" else device,
    )
    return _Present(address, device, owned=True)


def _store(address: RankAddress, launched: LaunchedWorld | None) -> Store:
    if launched is not None:
        host, port = launched.leader()
        return TCPStore(host, port, address.world_size, is_master=address.rank == 0)
    place = address.store
    if place is None:
        if address.world_size > 1:
            raise ConfigError(
                f"rank {address.rank} of {address.world_size} has an address without a store; give all ranks the "
                "same StoreAddress, at a store that open_store() made"
            )
        return HashStore()
    limit = timedelta(seconds=address.timeout_s)
    store = TCPStore(place.host, place.port, None, False, limit, wait_for_workers=False)
    return PrefixStore(place.name, store)
