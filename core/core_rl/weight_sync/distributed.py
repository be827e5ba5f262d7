"""An update by ``distributed``: `DistributedUpdate`, through a process group of the sender and the receiver's ranks.

The group is made for one update; the groups of the trainer and of the servers are as before. Rank 0 sends and keeps the
store. The other ranks are threads of an engine in this process (`WeightGroup.join`), or servers on any machine that get
the `GroupAddress`. The sender broadcasts each bucket as soon as the receiver has allowed it. Where the group breaks,
the receiver falls back to the buckets in shared memory.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public as torch.distributed.TCPStore, and not for mypy
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from core_rl.distributed.channel import Channel
from core_rl.distributed.process_group import listen_on
from core_rl.errors import WeightsError
from core_rl.weight_sync.cuda import require_nccl
from core_rl.weight_sync.messages import Bucket, GroupAddress, Kind, ReceiverRanks, RemoteChannel
from core_rl.weight_sync.tensor import ReceivedWeights, Sender, TensorUpdate

__all__ = ["DistributedUpdate", "RendezvousServer", "WeightGroup", "address_towards"]

logger = logging.getLogger(__name__)

JOIN_S = 60.0
"""The longest wait for ranks to join."""
BROADCAST_S = 300.0
"""The longest time of one broadcast."""


class DistributedUpdate(TensorUpdate):
    """One update of weights through a process group, with a copy through memory."""

    def sender(self, device: torch.device, on_bucket: Callable[[Bucket], object] | None) -> Sender:
        return _GroupSender(self, device, on_bucket)

    def greet(
        self, received: ReceivedWeights, channel: Channel, ranks: Callable[[], ReceiverRanks | None]
    ) -> None:
        received.read_hello()
        members = ranks()
        if members is not None and members.on_cpu and isinstance(channel, RemoteChannel):
            members = None  # the buckets go over TCP anyway
        received.reply(Kind.READY, members)
        if members is not None:
            _, received.group = received.next_message()

    @contextmanager
    def receive_copies(self, timeout_s: float) -> Iterator[Iterator[Bucket]]:
        with self.receive(timeout_s, lambda: ReceiverRanks(count=1, on_cpu=True)) as received:
            if received.group is None:
                yield ([(name, tensor.clone()) for name, tensor in bucket] for bucket in received)
                return
            group = WeightGroup.join(received.group, 1, torch.device("cpu"))
            try:
                yield _broadcast(received, group)
            finally:
                group.close()


def _broadcast(received: ReceivedWeights, group: WeightGroup) -> Iterator[Bucket]:
    for bucket in received:
        received.allow_broadcast()
        yield [(name, group.broadcast(torch.empty_like(tensor))) for name, tensor in bucket]


class _GroupSender(Sender):
    """Rank 0 of the group, as long as that is whole."""

    _group: WeightGroup | None = None

    def share_with(self, ranks: ReceiverRanks, channel: Channel) -> None:
        if isinstance(channel, RemoteChannel):
            ranks = replace(ranks, host=channel.own_address)
        rendezvous = RendezvousServer(ranks, self.device)
        try:
            self.post(Kind.GROUP, rendezvous.address)
            self._group = rendezvous.wait()
            self.broadcasts = True
        except WeightsError as error:
            self._fall_back(error)
        finally:
            rendezvous.close()

    def after_bucket(self, tensors: Bucket, on_device: Bucket) -> None:
        if self._group is None:
            return
        self.reply(Kind.ALLOW_BROADCAST)
        try:
            for _, tensor in tensors if self._group.on_cpu else on_device:
                self._group.broadcast(tensor)
        except WeightsError as error:
            self._fall_back(error)

    def _fall_back(self, error: WeightsError) -> None:
        logger.warning("falling back to shared memory for weight version %d: %s", self.meta.version, error)
        self._leave()

    def _leave(self) -> None:
        group, self._group, self.broadcasts = self._group, None, False
        if group is not None:
            group.close()

    def close(self, failure: str | None) -> None:
        self._leave()
        super().close(failure)


def address_towards(host: str) -> str:
    """The address of this machine that ``host`` sees; the same as that of ``host`` for this machine itself.

    Raises ``OSError`` for a host that is not known, or to which no route leads.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent
        address: str = probe.getsockname()[0]
        return address


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
    """The group under the keys that `torch.distributed` would use for its name.

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
