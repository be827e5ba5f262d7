"""Messages between sender and receiver of weights: kinds, records, channels and encoding."""

from __future__ import annotations

import hashlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

from core_rl.config.engine import LoraConfig
from core_rl.distributed.agreement import describe
from core_rl.distributed.channel import LIMIT_BYTES, Channel
from core_rl.distributed.sockets import short_socket_names
from core_rl.errors import WeightsError, raise_all
from core_rl.weight_sync.cuda import CudaEnvironment

Bucket = list[tuple[str, Tensor]]
"""Tensors with their names, as views of one piece of shared memory."""
Backend = Literal["gloo", "nccl"]

REPLY_TIMEOUT_S = 1800.0
"""Seconds that either side waits at most between two messages."""
_sharing_strategy = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class AdapterMetadata:
    """Properties of an adapter that its factors do not show."""

    rank: int
    alpha: int
    rslora: bool
    base: str | None = None
    """Digest of the weights below it (`digest_of_directory`); None for an update without ``verify``."""

    @staticmethod
    def of(lora: LoraConfig, base: str | None) -> AdapterMetadata:
        """The metadata of an adapter by ``lora`` over the weights with the digest ``base``."""
        return AdapterMetadata(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, base=base)

    def require_fit(self, lora: LoraConfig, base: Callable[[], str]) -> None:
        """Raise one `WeightsError` unless it agrees with the receiver's ``lora`` and with ``base()``, its digest."""
        raise_all(WeightsError, "the adapter does not fit this engine", self._violations(lora, base))

    def _violations(self, lora: LoraConfig, base: Callable[[], str]) -> Iterator[str]:
        for name in ("rank", "alpha", "rslora"):
            sent, expected = getattr(self, name), getattr(lora, name)
            if sent != expected:
                yield f"model.lora.{name} is {sent!r} at the sender and {expected!r} here; set both to the same"
        if self.base is not None and self.base != (digest := base()):
            yield (
                f"it belongs to another base model (digest {self.base[:8]} at the sender and {digest[:8]} here); set "
                "model.path to the base that it is trained on"
            )


class Kind(StrEnum):
    """The first field of each message; the comments name the others."""

    HELLO = "hello"  # sender: version, AdapterMetadata or None, DeltaBase or None
    READY = "ready"  # receiver: ReceiverRanks or None
    GROUP = "group"  # sender: GroupAddress
    BUCKET = "bucket"  # sender: tensors, bytes, digest or None, whether it is broadcast too, `DeviceMemory`s
    ALLOW_BROADCAST = "allow broadcast"  # receiver
    ACK = "ack"  # receiver: the bucket is copied
    END = "end"  # sender: there are no more buckets
    INSTALLED = "installed"  # receiver
    FAILED = "failed"  # either side: the error


@dataclass(frozen=True, kw_only=True)
class ReceiverRanks:
    """Ranks of the receiver, which join the group by ``distributed``."""

    count: int
    """Ranks other than the sender's."""
    host: str = "127.0.0.1"
    """The address of a rank: the sender listens where its machine sends from to get there."""
    on_cpu: bool = False
    """Whether they receive on the CPU, so that the group uses gloo whatever the sender's device."""
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


class RemoteChannel(Channel):
    """A channel to another machine, which shares no memory with this one."""

    def __init__(self, sock: socket.socket, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(sock, limit_bytes)
        self.own_address: str = sock.getsockname()[0]
        """The address of this machine towards the other one."""


def pickled_by_name(value: object) -> bytes:
    """``value`` as bytes in which tensors are names of shared memory that any process on this machine can open."""
    with shared_by_name():
        return bytes(ForkingPickler.dumps(value))


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Torch passes file descriptors by default, which only a child of the sender can open.

    The strategy belongs to the whole process: of two threads inside, the first to leave would end it for the other.
    """
    with _sharing_strategy, short_socket_names():
        before = get_sharing_strategy()
        set_sharing_strategy("file_system")
        try:
            yield
        finally:
            set_sharing_strategy(before)


def send_message(channel: Channel, kind: Kind, *fields: object) -> None:
    """Send one message; raises `OSError` or `TimeoutError` where the other side is gone."""
    channel.send([pickled_by_name((kind, *fields))], time.monotonic() + REPLY_TIMEOUT_S)


def receive_message(channel: Channel, peer: str) -> tuple[Any, ...]:
    """The next message of the ``peer``, a sender or receiver; raises `WeightsError` where it failed or is gone."""
    try:
        (payload,) = channel.receive(time.monotonic() + REPLY_TIMEOUT_S)
        with short_socket_names():  # of torch's manager of shared memory
            message: tuple[Any, ...] = pickle.loads(payload)  # noqa: S301  # from a rank of the same run
    except (EOFError, TimeoutError, ConnectionError) as error:
        raise WeightsError(f"the {peer} of the weights is gone: {describe(error)}") from error
    except RuntimeError as error:  # torch's: a bucket lives as long as its sender, until it is opened
        raise WeightsError(f"the {peer} of the weights and its shared memory are gone: {error}") from error
    if message[0] == Kind.FAILED:
        raise WeightsError(f"the {peer} of the weights failed: {message[1]}")
    return message


def digest_of(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names and bytes of ``tensors`` on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
