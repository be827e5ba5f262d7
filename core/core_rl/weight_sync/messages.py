"""What both sides of a stream of weights need: buckets, where they meet, and how messages are written."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    "ANSWER_S",
    "Bucket",
    "digest_of",
    "meeting_point",
    "pickled_by_name",
    "received",
    "shared_by_name",
]

Bucket = list[tuple[str, Tensor]]
"""Tensors with their names, as views of one piece of shared memory."""
ANSWER_S = 1800.0
"""How long either side waits for the other one between two messages."""


def pickled_by_name(value: object) -> bytes:
    """``value`` as bytes in which tensors are names of shared memory that any process on this machine can open."""
    with shared_by_name():
        return bytes(ForkingPickler.dumps(value))


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Torch passes file descriptors by default, which only a child of the sender can take."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


def received(channel: Channel) -> Any:
    """The next message; raises `EOFError`, `TimeoutError` or `ConnectionError` where none comes."""
    return pickle.loads(channel.receive(time.monotonic() + ANSWER_S))  # noqa: S301  # from a rank of the same run


def meeting_point(meta: WeightUpdateMeta) -> Path:
    """The file through which sender and receiver find each other; raises `ConfigError` where ``meta`` names none."""
    if not meta.path:
        raise ConfigError(
            f"WeightUpdateMeta(method={meta.method!r}) needs a path: a file through which sender and receiver meet"
        )
    return Path(meta.path)


def digest_of(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names and bytes of ``tensors`` on the CPU."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
