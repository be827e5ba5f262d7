"""A process group for weights (``method="distributed"``): rank 0 sends, the other ranks are those of a rollout engine.

It is made for one update; the groups of the trainer and of the servers are as before. Rank 0 keeps the store.
The other ranks are threads of an engine in this process (`WeightGroup.join`), or servers on any machine that get the
`GroupAddress`.
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

from core_rl.distributed.process_group import listen_on
from core_rl.errors import WeightsError
from core_rl.weight_sync.accelerators import CudaEnvironment, require_nccl

__all__ = ["GroupAddress", "ReceiverRanks", "RendezvousServer", "WeightGroup", "address_towards"]

Backend = Literal["gloo", "nccl"]

JOIN_S = 60.0
"""The longest wait for ranks to join."""
BROADCAST_S = 300.0
"""The longest time of one broadcast."""


@dataclass(frozen=True, kw_only=True)
class ReceiverRanks:
    """The receiver's ranks: by ``distributed`` those that join the group."""

    count: int
    """Ranks other than the sender's."""
    host: str = "127.0.0.1"
    """The address of one of them: the sender listens where its machine sends from to get there."""
    on_cpu: bool = False
    """Whether they receive on the CPU, so that the group is one of gloo whatever the sender's device."""
    cuda: tuple[CudaEnvironment, ...] = ()
    """CUDA environments of the servers whose ranks they are, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """Address, size and name of a group, for a rank that joins."""

    host: str
    port: int
    world_size: int
    name: str
    backend: Backend


def address_towards(host: str) -> str:
    """The address of this machine that ``host`` sees; the same as that of ``host`` for this machine itself.

    Raises ``OSError`` for a host that is not known, or to which no route leads.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent
        found: str = probe.getsockname()[0]
        return found


class RendezvousServer:
    """The listening socket of rank 0, whose address is known before the other ranks join."""

    def __init__(self, receivers: ReceiverRanks, device: torch.device) -> None:
        """Raises `WeightsError` for a host to which nothing leads, and for ranks that NCCL refuses."""
        self._device = torch.device("cpu") if receivers.on_cpu else device
        if self._device.type == "cuda":
            require_nccl(receivers.cuda, device)
        try:
            host = address_towards(receivers.host)
            self._listener = listen_on(host)
        except OSError as error:
            raise WeightsError(f"rank 0 cannot listen for ranks on {receivers.host}: {error}") from error
        self.address = GroupAddress(
            host=host,
            port=self._listener.getsockname()[1],
            world_size=1 + receivers.count,
            name=f"weights-{uuid4().hex[:12]}",
            backend="nccl" if self._device.type == "cuda" else "gloo",
        )

    def wait(self) -> WeightGroup:
        """The group, when all ranks have joined; raises `WeightsError` when they do not within a minute."""
        try:
            store = _store(self.address, self._listener.detach())
            return WeightGroup(self.address, store, 0, self._device)
        except (RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
            raise WeightsError(f"the ranks of the servers did not join {self.address}: {error}") from error

    def close(self) -> None:
        """Stop listening, where `wait` was not called."""
        self._listener.close()


class WeightGroup:
    """One rank of the group, until it is closed or collected."""

    def __init__(self, address: GroupAddress, store: Store, rank: int, device: torch.device) -> None:
        self._device = device
        self._group = _group(address, store, rank)
        self._store = store  # its server, at rank 0
        self.on_cpu = device.type == "cpu"
        """Whether this rank broadcasts from the CPU."""

    @staticmethod
    def join(address: GroupAddress, rank: int, device: torch.device) -> WeightGroup:
        """Join as ``rank``, from 1 on; raises `WeightsError` when the others do not join."""
        try:
            return WeightGroup(address, _store(address, None), rank, device)
        except (RuntimeError, OSError) as error:
            raise WeightsError(f"rank {rank} cannot join {address}: {error}") from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send ``tensor`` at rank 0, and fill it at the others; returns it, on the device of this rank.

        Raises `WeightsError` when a rank is gone.
        """
        local = tensor.to(self._device)
        try:
            self._group.broadcast(local, root=0).wait()
        except RuntimeError as error:
            raise WeightsError(f"a rank of the weight update is gone: {error}") from error
        return local

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get an error."""
        if self._device.type == "cuda":
            self._group.abort()
        del self._group, self._store


def _store(address: GroupAddress, listener: int | None) -> TCPStore:
    """The store of the rendezvous; rank 0 serves it on the socket ``listener``."""
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
    began), and find this rank there. Made directly it is not registered anywhere, nor does it need a default group.
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
