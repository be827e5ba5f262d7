"""Messages between sender and receiver of weights: kinds, buckets, encoding, and the rendezvous file."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.channel import Channel
from core_rl.errors import ConfigError

__all__ = [
    "REPLY_TIMEOUT_S",
    "Bucket",
    "Kind",
    "digest_of",
    "pickled_by_name",
    "receive_message",
    "rendezvous_file",
    "shared_by_name",
]

Bucket = list[tuple[str, Tensor]]
"""Tensors with their names, as views of one piece of shared memory."""
REPLY_TIMEOUT_S = 1800.0
"""The longest wait of either side between two messages."""


class Kind(StrEnum):
    """The first field of each message; the comments name the others."""

    HELLO = "hello"  # sender: version, AdapterMetadata or None
    READY = "ready"  # receiver: ReceiverRanks or None
    GROUP = "group"  # sender: GroupAddress
    BUCKET = "bucket"  # sender: tensors, bytes, digest or None, whether it is broadcast too
    ALLOW_BROADCAST = "allow broadcast"  # receiver
    ACK = "ack"  # receiver: the bucket is copied
    END = "end"  # sender: there are no more buckets
    INSTALLED = "installed"  # receiver
    FAILED = "failed"  # either side: the error


def pickled_by_name(value: object) -> bytes:
    """``value`` as bytes in which tensors are names of shared memory that any process on this machine can open."""
    with shared_by_name():
        return bytes(ForkingPickler.dumps(value))


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Torch passes file descriptors by default, which only a child of the sender can open."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


def receive_message(channel: Channel) -> Any:
    """The next message; raises `EOFError`, `TimeoutError` or `ConnectionError` if none arrives."""
    return pickle.loads(channel.receive(time.monotonic() + REPLY_TIMEOUT_S))  # noqa: S301  # from a rank of the same run


def rendezvous_file(meta: WeightUpdateMeta) -> Path:
    """The file that names the receiver's socket; raises `ConfigError` for a ``meta`` without a path."""
    if not meta.path:
        raise ConfigError(
            f"WeightUpdateMeta(method={meta.method!r}) needs a path: a file through which the sender finds the receiver"
        )
    return Path(meta.path)


def digest_of(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names and bytes of ``tensors`` on the CPU."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
