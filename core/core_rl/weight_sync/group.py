"""A process group for weights (``method="distributed"``): rank 0 sends, the other ranks are those of a rollout engine.

It is made for one update and belongs to nothing else: the groups of the trainer and of the servers are as before.
Rank 0 keeps the store. The other ranks are threads of an engine in this process (`WeightGroup.join`), or servers that
are told the `GroupAddress`, wherever they run.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public as torch.distributed.TCPStore, and not for mypy
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from core_rl.errors import WeightsError

__all__ = ["GroupAddress", "Invitation", "Seats", "WeightGroup"]

Backend = Literal["gloo", "nccl"]

JOIN_S = 60.0
"""How long ranks wait for one another."""
BROADCAST_S = 300.0
"""How long one broadcast may take."""


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Who is to join, as the receiver of weights says."""

    count: int
    """Ranks beside the sender's."""
    host: str = "127.0.0.1"
    """The sender's machine, as those ranks reach it."""


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """What a rank needs in order to join."""

    host: str
    port: int
    world_size: int
    name: str
    backend: Backend


class Invitation:
    """The place where rank 0 waits: an address that others can be told before it blocks."""

    def __init__(self, seats: Seats, device: torch.device) -> None:
        """Raises `WeightsError` for a host that this machine is not."""
        self._device = device
        family = socket.AF_INET6 if ":" in seats.host else socket.AF_INET
        self._listener = socket.socket(family)
        try:
            self._listener.bind((seats.host, 0))
        except OSError as error:
            self._listener.close()
            raise WeightsError(f"no rank can be met at {seats.host}: {error}") from error
        self._listener.listen()
        self.address = GroupAddress(
            host=seats.host,
            port=self._listener.getsockname()[1],
            world_size=1 + seats.count,
            name=f"weights-{uuid4().hex[:12]}",
            backend="nccl" if device.type == "cuda" else "gloo",
        )

    def wait(self) -> WeightGroup:
        """The group, when all have come; raises `WeightsError` when they do not within a minute."""
        try:
            store = _store(self.address, self._listener.detach())
            return WeightGroup(self.address, store, 0, self._device)
        except (RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
            raise WeightsError(f"the ranks of the servers did not join {self.address}: {error}") from error

    def close(self) -> None:
        """Stop listening, where `wait` was not called."""
        self._listener.close()


class WeightGroup:
    """One rank of the group; `close` it, or let go of it."""

    def __init__(self, address: GroupAddress, store: Store, rank: int, device: torch.device) -> None:
        self._device = device
        self._group = _group(address, store, rank)
        self._store = store  # its server, at rank 0

    @staticmethod
    def join(address: GroupAddress, rank: int, device: torch.device) -> WeightGroup:
        """Join as ``rank``, from 1 on; raises `WeightsError` when the others do not come."""
        try:
            return WeightGroup(address, _store(address, None), rank, device)
        except (RuntimeError, OSError) as error:
            raise WeightsError(f"rank {rank} cannot join {address}: {error}") from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send ``tensor`` at rank 0, and fill it at the others; returns it, on the device of this rank.

        Raises `WeightsError` when a rank is gone.
        """
        there = tensor.to(self._device)
        try:
            self._group.broadcast(there, root=0).wait()
        except RuntimeError as error:
            raise WeightsError(f"a rank of the weight update is gone: {error}") from error
        return there

    def close(self) -> None:
        """Leave: whoever waits for this rank gets an error."""
        if self._device.type == "cuda":
            self._group.abort()
        del self._group, self._store


def _store(address: GroupAddress, listener: int | None) -> TCPStore:
    """The store that ranks meet in; rank 0 serves it on the socket ``listener``."""
    return TCPStore(
        address.host,
        address.port,
        address.world_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=JOIN_S),
        master_listen_fd=listener,
    )


def _group(
    address: GroupAddress, store: Store, rank: int
) -> Any:  # torch's stubs leave out a backend's collectives
    """The group under the keys that `torch.distributed` would use for one of that name.

    Servers make it through ``_new_process_group_helper`` (SGLang's ``init_custom_process_group``, which OpenRLHF
    began), and meet this rank there. Made directly it is not registered anywhere, nor does it need a default group.
    """
    device = "cuda" if address.backend == "nccl" else "cpu"
    for prefix in (address.name, f"{address.name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    limit = timedelta(seconds=BROADCAST_S)
    if address.backend == "gloo":
        return ProcessGroupGloo(store, rank, address.world_size, limit)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, address.world_size, options)
